"""Exceptions of a user's own code, from this process and from others: the frames that are the user's."""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path

from ..runtime.controller.errors import RemoteTraceback

_FRAME = re.compile(r'^  File "(?P<file>[^"\n]+)", line \d+.*\n(?:    .*\n?)*', re.MULTILINE)
_HOMES = [Path(__file__).parents[2] / name for name in ("forge", "forge_envs", "forge_sandbox", "forge_weaver")]
_LIBRARIES = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platlib", "purelib")]


def summary(error: BaseException) -> str:
    """An exception in one line, as "KeyError: 'answer'"."""
    return " ".join("".join(traceback.format_exception_only(type(error), error)).partition("\n")[0].split())


def user_frames(error: BaseException) -> list[str]:
    """The frames of an exception and of its causes that are neither of this library, nor of installed packages, nor of
    Python, in the form of a traceback; those of another process first."""
    frames: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        text = cause.text if isinstance(cause, RemoteTraceback) else "".join(traceback.format_tb(cause.__traceback__))
        users = [match[0].rstrip("\n") for match in _FRAME.finditer(text) if _is_users(match["file"])]
        frames = users + frames
        cause = cause.__cause__
    return frames


def _is_users(file: str) -> bool:
    if file.startswith("<") and file != "<dynamic-code>":  # of a function that was sent by value
        return False
    return not any(Path(file).is_relative_to(home) for home in [*_HOMES, *_LIBRARIES])
