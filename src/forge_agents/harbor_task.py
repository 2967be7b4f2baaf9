"""Task folders of Harbor: what they ask for, and what of it can be had without a container."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from forge.config import ConfigError
from forge.config.sections import Section, build

from .agent import CommandResult
from .collection_config import CollectionConfig
from .dockerfile import INNER, Image, read_dockerfile
from .task_folder import fresh, give

log = logging.getLogger(__name__)

TESTS = f"{INNER}/tests"
VERIFIER = f"{INNER}/logs/verifier"  # where test.sh writes the reward
LOGS = ("agent", "verifier", "artifacts")
CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
TEST_TIMEOUT = 600.0  # seconds, Harbor's default
# Sections and keys of task.toml by which a task needs what only a container has.
NEEDS = {
    "environment": ("docker_image", "gpus", "gpu_types", "tpu", "mcp_servers", "skills_dir", "healthcheck"),
    "verifier": ("user", "environment", "collect"),
    "agent": ("user",),
}
Table = dict[str, Any]  # of task.toml


class HarborArgs(Section):
    """The `args` of task folders."""

    ignore: list[str] = Field(default_factory=list)
    """What to ignore of tasks, which may make them unsolvable: `RUN`, `docker_image`, ... as errors name it."""
    reward: str | None = None
    """The reward of `reward.json` that is trained, where it has several."""


@dataclass(frozen=True)
class HarborTask:
    """A task.

    instruction: the prompt.
    timeout: seconds of the agent; None: no limit of the task.
    memory_mb: of all processes; None: as configured.
    """

    folder: Path
    instruction: str
    image: Image
    env: Mapping[str, str] = field(default_factory=dict)
    test_env: Mapping[str, str] = field(default_factory=dict)
    timeout: float | None = None
    test_timeout: float = TEST_TIMEOUT
    memory_mb: int | None = None

    def links(self, readable: tuple[str, ...] = ()) -> dict[str, str]:
        """Paths that programs find as in the task's container. ValueError: see `Image.links`."""
        return {"/tests": TESTS, "/logs": f"{INNER}/logs", **self.image.links(readable)}

    def stage(self, folder: Path) -> None:
        """Make the folder that an episode begins with."""
        for name in LOGS:
            (folder / INNER / "logs" / name).mkdir(parents=True)
        self.image.stage(folder)

    def put_tests(self, folder: Path, *, owned: bool) -> None:
        """Put the tests into the task folder that an agent left, and remove rewards that it wrote.

        Args:
            owned: give them to the user of confined programs.
        """
        tests = fresh(folder, TESTS)
        shutil.copytree(self.folder / "tests", tests, symlinks=True, dirs_exist_ok=True)
        (tests / "test.sh").chmod(0o755)
        fresh(folder, VERIFIER)
        if owned:
            give(folder / INNER)


def read_tasks(collection: CollectionConfig) -> dict[str, HarborTask]:
    """The tasks of a folder by their names, which are their paths in it. ConfigError: there are none, or one is invalid
    or needs a container."""
    args = build(HarborArgs, collection.args, "episode.agent.collection.args")
    root = Path(collection.environment)
    files = sorted(root.rglob("task.toml"))
    if not files:
        raise ConfigError(f"episode.agent.collection.environment {root} is not a folder with task folders of Harbor")
    tasks = {str(file.parent.relative_to(root)): read_task(file.parent, args.ignore) for file in files}
    log.info(
        "%d task folders of Harbor: programs are this machine's, not those of %s, and reach the gateway alone",
        *(len(tasks), ", ".join(sorted({task.image.base for task in tasks.values()} - {""})) or "an image"),
    )
    return tasks


def read_task(folder: Path, ignore: list[str] | None = None) -> HarborTask:
    """Read a task folder.

    Args:
        ignore: what may be missing of its container.

    Raises:
        ConfigError: it is invalid, or needs a container.
    """
    try:
        return _read_task(folder, ignore or [])
    except (ValueError, OSError, TypeError, AttributeError) as error:
        raise ConfigError(f"task folder {folder}: {error}") from None


def _read_task(folder: Path, ignore: list[str]) -> HarborTask:
    def unsupported(word: str, text: str) -> None:
        if word not in ignore:
            raise ValueError(f"{text} needs a container: omit the task, or args.ignore: [{word}] to run it without")

    table = tomllib.loads((folder / "task.toml").read_text())
    environment: Table = table.get("environment", {})
    verifier: Table = table.get("verifier", {})
    if table.get("steps"):
        raise ValueError("it has several steps, and one is supported")
    for name in ("trajectory.json", ".harborignore"):
        if (folder / name).exists():
            raise ValueError(f"{name} is unsupported")
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise ValueError(f"it has no {name}")
    if environment.get("os", "linux").lower() != "linux":
        raise ValueError("environment.os must be linux")
    if verifier.get("environment_mode", "shared") != "shared":
        unsupported("separate", "verifier.environment_mode = separate")
    for section, names in NEEDS.items():
        for name in names:
            if table.get(section, {}).get(name) not in (None, 0, [], {}, "root"):
                unsupported(name, f"{section}.{name}")
    build_folder = folder / "environment"
    for name in ("docker-compose.yaml", "docker-compose.yml", "singularity-compose.yaml", ".dockerignore"):
        if (build_folder / name).exists():
            unsupported(name, name)
    dockerfile = build_folder / "Dockerfile"
    text = dockerfile.read_text() if dockerfile.exists() else ""
    image = read_dockerfile(text, build_folder, unsupported)
    if environment.get("workdir"):
        image.workdir = os.path.normpath(environment["workdir"])
    task = HarborTask(
        folder,
        instruction_of((folder / "instruction.md").read_text()),
        image,
        # The working folder by the name that it has in the task's container, which shells believe.
        {"PWD": image.workdir, **image.env, **_texts(environment.get("env", {}))},
        _texts(verifier.get("env", {})),
        timeout=table.get("agent", {}).get("timeout_sec"),
        test_timeout=float(verifier.get("timeout_sec", TEST_TIMEOUT)),
        memory_mb=environment.get("memory_mb"),
    )
    task.links()
    return task


def instruction_of(text: str) -> str:
    """An instruction without the marks at its beginning by which benchmarks find themselves in training data."""
    lines = text.split("\n")
    while lines and CANARY.fullmatch(lines[0].strip()):
        lines.pop(0)
    return "\n".join(lines).lstrip("\n") if len(lines) < text.count("\n") + 1 else text


def _texts(variables: Table) -> dict[str, str]:
    """Variables. ValueError: one asks for a variable of this machine, which may be a secret."""
    for name, value in variables.items():
        if "${" in str(value):
            raise ValueError(f"env.{name} asks for a variable of this machine ({value}): set it by episode.agent.env")
    return {name: str(value) for name, value in variables.items()}


def reward_of(result: CommandResult, name: str | None) -> float:
    """The reward that the tests wrote. ValueError: there is none, or it is not one finite number.

    Args:
        name: of the reward, where there are several.
    """
    try:
        values: Any = json.loads(result.read(f"{VERIFIER}/reward.json"))
    except FileNotFoundError:
        try:
            values = float(result.read(f"{VERIFIER}/reward.txt"))
        except FileNotFoundError:
            raise ValueError("the tests wrote no /logs/verifier/reward.txt or reward.json") from None
    if isinstance(values, dict):
        wanted = name or ("reward" if "reward" in values else next(iter(values)) if len(values) == 1 else None)
        if wanted not in values:
            raise ValueError(f"reward.json has {', '.join(values) or 'nothing'}: name one by args.reward")
        values = values[wanted]
    if isinstance(values, bool) or not isinstance(values, int | float) or not math.isfinite(values):
        raise ValueError(f"the reward is {values!r}, not a finite number")
    return float(values)
