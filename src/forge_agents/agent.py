"""What an agent's command is, the variables that it gets, and how it ended."""

import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal, get_args

HOME = ".home"  # in the task folder
NOBODY = 65534  # the user of confined programs


def fill_task_folder(
    folder: Path, source: str | Path | None, files: Mapping[str, str], *, new: bool, owned: bool
) -> None:
    """Fill a task folder. What an agent left in the way of a text, a link, a folder or a locked one, is replaced by it.

    Args:
        source: a folder that is copied, for a new one.
        files: texts by their paths in the folder.
        new: create it first.
        owned: make all of it the property of the user that confined programs run as.

    Raises:
        ValueError: a path that leads out of it.
    """
    paths = {PurePosixPath(name): text for name, text in files.items()}
    for path in paths:
        if path.is_absolute() or not path.parts or ".." in path.parts:
            raise ValueError(f"files must be named by paths within the task folder, got {str(path)!r}")
    places = (folder, folder.parent / "tmp")

    if new:
        folder.parent.mkdir(parents=True)
        if source is None:
            folder.mkdir()
        else:
            shutil.copytree(source, folder, symlinks=True)
        (folder / HOME).mkdir(exist_ok=True)
        places[1].mkdir()

    for place in places:
        place.chmod(0o755)
    for path, text in paths.items():
        for parent in [*reversed(path.parents)][1:]:
            inner = folder / parent
            if inner.is_symlink() or not inner.is_dir():
                inner.unlink(missing_ok=True)
                inner.mkdir()
            inner.chmod(0o755)

        target = folder / path
        if target.is_dir() and not target.is_symlink():
            remove_folder(target)
        target.unlink(missing_ok=True)
        target.write_text(text)

    if owned:
        for place in places:
            give_to_nobody(place)


def give_to_nobody(folder: Path) -> None:
    """Make all of a folder the property of the user that programs run as."""
    os.chown(folder, NOBODY, NOBODY)
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            os.chown(os.path.join(parent, name), NOBODY, NOBODY, follow_symlinks=False)


def unlock_folders(folder: Path) -> None:
    """Make all folders below one such that this user can remove them: an agent may have taken its rights away."""
    for parent, folders, _ in os.walk(folder):
        for name in folders:
            path = os.path.join(parent, name)
            if stat.S_ISDIR(os.lstat(path).st_mode):
                os.chmod(path, 0o700)


def remove_folder(folder: Path) -> None:
    """Remove a folder if it exists, whatever rights its parts have."""
    if folder.exists():
        folder.chmod(0o700)
        unlock_folders(folder)
        shutil.rmtree(folder)


Status = Literal["exited", "timeout", "memory", "killed", "missing", "failed"]
Network = Literal["gateway", "host"]


@dataclass(frozen=True)
class AgentCommand:
    """A program that plays an episode.

    In `command` and `env`, `{url}`, `{key}`, `{model}`, `{task}` and `{folder}` stand for the gateway's address, the
    episode's key, the policy's name, the text of the task, and the task folder as the program sees it.

    Args:
        command: the program and its arguments.
        env: variables alongside those that `CommandRunner` sets.
        files: a folder that is copied into the task folder.
        timeout: seconds.
        memory_mb: of all its processes together, checked every 50 ms.
        processes: processes and threads that it may have at once. Programs on node start about ten threads each.
        output_kb: of stdout and of stderr, after which it is ended.
        readable: files and folders that it may read alongside the system and this Python; `bin` of a folder is in PATH.
        network: "gateway" reaches the gateway only; "host" all that this machine reaches.

    Raises:
        ValueError: an invalid setting.
    """

    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    files: str | Path | None = None
    timeout: float = 600.0
    memory_mb: int = 4096
    processes: int = 256
    output_kb: int = 4096
    readable: Sequence[str | Path] = ()
    network: Network = "gateway"

    def __post_init__(self) -> None:
        words = [] if isinstance(self.command, str) else list(self.command)
        if not words or not all(isinstance(word, str) for word in words) or not words[0]:
            raise ValueError(f"command must be a list of a program and its arguments, got {self.command!r}")
        for name in ("timeout", "memory_mb", "processes", "output_kb"):
            number = getattr(self, name)
            if isinstance(number, bool) or not 0 < number < float("inf"):
                raise ValueError(f"{name} must be a positive number, got {number!r}")

        if self.network not in get_args(Network):
            raise ValueError(f"network must be gateway or host, got {self.network!r}")
        if self.files is not None and not Path(self.files).is_dir():
            raise ValueError(f"files must be a directory to copy, got {self.files}")
        for path in self.readable:
            if not os.path.exists(path):
                raise ValueError(f"readable has {path}, which does not exist")
            if os.path.realpath(path) == "/":
                raise ValueError("readable must not be the root folder: name what the program needs")


@dataclass(frozen=True)
class CommandResult:
    """How a program ended.

    `status` is one of

    - "exited": by itself, whatever its exit code, which is negative for a signal such as a crash;
    - "timeout", "memory": ended at that limit;
    - "killed": ended because its output exceeded the limit, or by a SIGKILL of someone else;
    - "missing": there is no such program, or it cannot be executed;
    - "failed": this machine or this library failed: nothing is known about the agent.

    `reason` explains all but "exited" in one line. `stdout` and `stderr` are their last 64 KiB. `folder` is the task
    folder, which stays until `remove`; no process of the run is left in it. What lies there is the agent's work, links
    to elsewhere included: read files with `read`.
    """

    status: Status
    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    folder: Path
    reason: str = ""

    def read(self, path: str, limit: int = 1 << 20) -> bytes:
        """Return the first `limit` bytes of a file in the folder.

        Raises:
            FileNotFoundError: it is not there, or not a regular file, or a link to outside.
        """
        real = os.path.realpath(self.folder / path)
        root = os.path.realpath(self.folder)
        # Nothing runs in the folder now, so that a link cannot change between check and use.
        if not real.startswith(f"{root}/") or not os.path.isfile(real):
            raise FileNotFoundError(f"{path} is not a file of the task folder")
        with open(real, "rb") as file:
            return file.read(limit)

    def remove(self) -> None:
        """Remove the folder; it may be removed already."""
        remove_folder(self.folder.parent)


def agent_environment(words: Mapping[str, str], path: str) -> dict[str, str]:
    """Return the variables of an agent, by which the clients of each API find the gateway: the whole environment.

    Args:
        words: "url", "key", "model", "task" and "folder", as in `AgentCommand`.
        path: the folders of programs, as in PATH.
    """
    url = words["url"]
    key = words["key"]
    model = words["model"]
    claude = ("MODEL", "SMALL_FAST_MODEL", "DEFAULT_HAIKU_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_OPUS_MODEL")
    env = {"PATH": path, "LANG": "C.UTF-8", "HOME": f"{words['folder']}/{HOME}", "FORGE_TASK": words["task"]}

    if url:
        env |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": key}
        env |= {"OPENAI_MODEL": model, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key}
        env |= {f"ANTHROPIC_{name}": model for name in claude}
        env |= {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_MODEL_NAME": f"openai/{model}",
        }

    # Requests to loopback go to no proxy, and programs do not look for news, prices and places for their telemetry.
    env |= {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
    env |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    return {**env, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1"}
