"""An agent's command and its result, its environment variables, and the folder in which it works."""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal, get_args

from forge.system.scratch import remove_tree

HOME = ".home"  # the program's home, a folder in the task folder
TASK = f"{HOME}/task.txt"  # the file with the text of the task, in the task folder
MAX_VARIABLE = 130_000  # bytes of a variable or argument; the kernel takes 128 KiB with the variable's name
NOBODY = 65534  # id of the user and the group with which confined programs run


def fill_task_folder(
    folder: Path, source: str | Path | None, files: Mapping[str, str], *, new: bool, owned: bool
) -> None:
    """Write texts into a task folder, which is created first if it is new, along with a folder for temporary files.

    A link, file or folder that an agent has left where a text or one of its folders belongs is replaced.

    Args:
        folder: the task folder. The folder for temporary files is "tmp" alongside it.
        source: a folder whose content a new task folder gets; None: it is empty.
        files: the texts by their paths within the folder.
        new: whether to create the folders.
        owned: whether to change the owner of both folders to the user with which confined programs run.

    Raises:
        ValueError: a path leads out of the folder.
    """
    texts = {PurePosixPath(name): text for name, text in files.items()}
    for path in texts:
        if path.is_absolute() or not path.parts or ".." in path.parts:
            raise ValueError(f"files must have paths within the task directory, got {str(path)!r}")

    tmp_folder = folder.parent / "tmp"
    owner = NOBODY if owned else -1  # -1: it stays the same
    if new:
        folder.parent.mkdir(parents=True)
        if source is None:
            folder.mkdir()
        else:
            shutil.copytree(source, folder, symlinks=True)
        (folder / HOME).mkdir(exist_ok=True)
        tmp_folder.mkdir()
        for content in folder.rglob("*"):
            os.chown(content, owner, owner, follow_symlinks=False)
    for top in (folder, tmp_folder):
        top.chmod(0o755)
        os.chown(top, owner, owner)

    for path, text in texts.items():
        # From the outermost folder of the path to the innermost; the first of `parents` is the task folder itself.
        for parent in [*reversed(path.parents)][1:]:
            inner = folder / parent
            if inner.is_symlink() or not inner.is_dir():
                inner.unlink(missing_ok=True)
                inner.mkdir()
            inner.chmod(0o755)
            os.chown(inner, owner, owner)

        target = folder / path
        if target.is_dir() and not target.is_symlink():
            remove_tree(target)
        # A new file, not the old one's content: that may be a link, or not be writable.
        target.unlink(missing_ok=True)
        target.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.chown(target, owner, owner)


Status = Literal["exited", "timeout", "memory", "killed", "missing", "failed"]
Network = Literal["gateway", "host"]


@dataclass(frozen=True)
class AgentCommand:
    """Agent program that plays an episode, with its limits and files.

    In `command` and `env`, `{url}`, `{key}`, `{model}`, `{task}` and `{folder}` stand for the gateway's address, the
    episode's key, the policy's name, the text of the task, and the task folder as the program sees it.

    Args:
        command: the program and its arguments.
        env: environment variables in addition to the variables of `agent_environment`.
        files: a folder that is copied into the task folder.
        timeout: seconds after which the program is ended.
        memory_mb: the limit for all its processes together, checked every 50 ms.
        processes: how many processes and threads it may have at once. Programs on node start about ten threads each.
        output_kb: the limit for each of stdout and stderr, beyond which the program is ended.
        readable: files and folders that it may read in addition to the system and this Python. The `bin` of each folder
            is in its PATH.
        network: what it can connect to: "gateway": only the gateway; "host": all that this machine can.

    Raises:
        ValueError: a setting is invalid.
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
        arguments = [] if isinstance(self.command, str) else list(self.command)
        if not arguments or not arguments[0] or not all(isinstance(argument, str) for argument in arguments):
            raise ValueError(f"command must be a list of a program and its arguments, got {self.command!r}")
        for name in ("timeout", "memory_mb", "processes", "output_kb"):
            number = getattr(self, name)
            if isinstance(number, bool) or not 0 < number < float("inf"):
                raise ValueError(f"{name} must be a positive number, got {number!r}")

        if self.network not in get_args(Network):
            raise ValueError(f"network must be gateway or host, got {self.network!r}")
        if self.files is not None:
            if not Path(self.files).is_dir():
                raise ValueError(f"files must be a directory to copy, got {self.files}")
            # It may hold only files, folders and links within it.
            root = os.path.realpath(self.files)
            for content in Path(self.files).rglob("*"):
                is_file = content.is_file() or content.is_dir()
                if content.is_symlink():
                    is_relative = not os.path.isabs(os.readlink(content))
                    is_file = is_relative and Path(os.path.realpath(content)).is_relative_to(root)
                if not is_file:
                    raise ValueError(
                        f"files: {content} must be a file, a directory or a link within {self.files}: put a copy there"
                    )
        for path in self.readable:
            if not os.path.exists(path):
                raise ValueError(f"readable has {path}, which does not exist")
            if os.path.realpath(path) == "/":
                raise ValueError("readable must not be the root directory: list only the paths that the program needs")


@dataclass(frozen=True)
class CommandResult:
    """Result of an agent program: how it ended, its output and its files.

    status: one of
        - "exited": it ended by itself, with any exit code;
        - "timeout", "memory": it was ended at that limit;
        - "killed": it was ended because its output exceeded the limit, or by a SIGKILL from elsewhere;
        - "missing": there is no such program, or it cannot be executed;
        - "failed": this machine or this library failed, and nothing is known about the agent.
    exit_code: negative for a signal: -11 after a segmentation fault.
    stdout, stderr: the last 64 KiB of each.
    seconds: how long it ran.
    folder: the task folder, which exists until `remove`. All processes of the program have ended. Links in it may lead
        elsewhere: read its files by `read`.
    reason: explains every status but "exited" in one line.
    """

    status: Status
    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    folder: Path
    reason: str = ""

    def read(self, path: str, limit: int = 1 << 20) -> bytes:
        """Return the first `limit` bytes of a file in the task folder.

        Raises:
            FileNotFoundError: the file does not exist, is not a regular file, or is a link that leads elsewhere.
        """
        real_path = os.path.realpath(self.folder / path)
        root = os.path.realpath(self.folder)
        # No process of the agent is left that could replace the file by a link after this check.
        if not real_path.startswith(f"{root}/") or not os.path.isfile(real_path):
            raise FileNotFoundError(f"{path} must be a file within the task directory")
        with open(real_path, "rb") as file:
            return file.read(limit)

    def remove(self) -> None:
        """Remove the task folder and its folder for temporary files, if they still exist."""
        remove_tree(self.folder.parent)


def fits_variable(text: str) -> bool:
    """Return whether a text can be an environment variable or an argument: it is UTF-8, short enough, without a NUL."""
    return not re.search("[\0\ud800-\udfff]", text) and len(text.encode()) < MAX_VARIABLE


def agent_environment(values: Mapping[str, str], path: str) -> dict[str, str]:
    """Return all environment variables of an agent's program, which inherits none from this process.

    Among them are those from which OpenAI's and Anthropic's clients, and the agents built on them, read the address of
    their API, the key and the model, so that they use the gateway without options.

    Args:
        values: what the placeholders "url", "key", "model", "task" and "folder" of `AgentCommand` stand for. If "url"
            is "", there is no gateway, and its variables are not set.
        path: the value of PATH.
    """
    url = values["url"]
    key = values["key"]
    model = values["model"]
    claude = ("MODEL", "SMALL_FAST_MODEL", "DEFAULT_HAIKU_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_OPUS_MODEL")
    env = {
        **{"PATH": path, "LANG": "C.UTF-8", "HOME": f"{values['folder']}/{HOME}"},
        # Requests to the gateway, on loopback, must not be sent to a proxy. Programs that cannot reach the internet
        # should not try to download prices, check for updates or send telemetry, which would only delay them.
        **{"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"},
        **{"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"},
        **{"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1"},
    }
    # A task that is too long for a variable is in a file.
    env |= (
        {"FORGE_TASK": values["task"]}
        if fits_variable(values["task"])
        else {"FORGE_TASK_FILE": f"{values['folder']}/{TASK}"}
    )
    if url:
        env |= {
            **{"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": key},
            **{"OPENAI_MODEL": model, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key},
            **{f"ANTHROPIC_{name}": model for name in claude},
            # Of mini-swe-agent, which otherwise asks for its settings and raises an error for a model without a price.
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_MODEL_NAME": f"openai/{model}",
        }
    return env
