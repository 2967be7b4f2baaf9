"""`forge agents`: writes the datasets that a run with agents needs before it starts."""

import asyncio
import json
from pathlib import Path

from forge.cli.subparsers import Subparsers, add_command

# Functions import what takes seconds to import, so that other commands do not wait for it.


def add_to(commands: Subparsers) -> None:
    """Add the command `forge agents` and its steps to the subparsers `commands`."""
    agents = commands.add_parser(
        "agents",
        help="write the tasks of a collection of environments as rows",
        description="What a run needs whose episodes agents play, see docs/agent_gateway.md.",
        epilog="example: forge agents rows agent.yaml",
    )
    steps = agents.add_subparsers(dest="step", required=True, metavar="STEP")
    about = "write the tasks of episode.agent.collection to dataset.path and, of held-out ones, eval.path"
    share = "share that is held out if the collection has no split; default .1"
    add_command(
        steps,
        "rows",
        about,
        "agent.yaml --held-out .1",
        lambda args: print(write_rows(Path(args.config), args.limit, args.held_out, args.overwrite)),
        [
            ("config", {"help": "the run's YAML file"}),
            ("--limit", {"type": int, "default": -1, "help": "read at most this many tasks; default: all"}),
            ("--held-out", {"type": float, "default": 0.1, "help": share}),
            ("--overwrite", {"action": "store_true", "help": "replace files that exist"}),
        ],
    )


def write_rows(config: Path, limit: int = -1, share: float = 0.1, overwrite: bool = False) -> str:
    """Write the tasks of a configuration's collection to its `dataset.path` and `eval.path`, one JSON object a line.

    Args:
        config: the run's YAML file, in which `episode.agent.collection` is set.
        limit: the most tasks to read; -1: all.
        share: which share of the tasks to hold out for evaluation if the collection has no held-out tasks, 0 to 1.
        overwrite: replace files that exist.

    Returns:
        A line for the user, such as "90 rows in train.jsonl, 10 rows in eval.jsonl".

    Raises:
        ConfigError: a setting is missing or invalid, the collection failed, or a file exists.
        OSError: a file cannot be read or written.
    """
    from forge.config import ConfigError
    from forge.config.yaml_files import read_yaml

    from .collection import hold_out, read_rows
    from .recipe import agent_config

    values = read_yaml(config) or {}
    agent = agent_config((values.get("episode") or {}).get("agent") or {})
    if agent.collection is None:
        raise ConfigError(f"{config}: episode.agent.collection is not set")
    if not 0 <= share < 1:
        raise ConfigError(f"--held-out must be from 0 to below 1, got {share}")
    paths: dict[str, Path] = {}

    for split, section in (("train", "dataset"), ("eval", "eval")):
        name = (values.get(section) or {}).get("path")
        if not isinstance(name, str) or not name.endswith(".jsonl"):
            raise ConfigError(f"{config}: {section}.path must name the .jsonl file to write, got {name!r}")
        paths[split] = Path(name)
        if paths[split].exists() and not overwrite:
            raise ConfigError(f"{name} exists: choose another {section}.path, or pass --overwrite to replace it")

    splits = asyncio.run(read_rows(agent, limit))
    if not splits["eval"]:
        splits["train"], splits["eval"] = hold_out(splits["train"], share)
    if not splits["train"]:
        raise ConfigError(f"the collection has no tasks for training, and {len(splits['eval'])} that are held out")
    for split, path in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        # A dataset's answers are texts: the task, which is JSON, is written as text within the row's JSON.
        lines = (json.dumps({**row, "answer": json.dumps(row["answer"])}) + "\n" for row in splits[split])
        path.write_text("".join(lines))

    return ", ".join(f"{len(splits[split])} rows in {path}" for split, path in paths.items())
