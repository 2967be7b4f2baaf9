"""Selection of the isolation level: a canary program tries what must be blocked."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence

from .worker import SandboxError, Settings, Worker

LEVELS = ("namespaces", "none")

_CANARY = """
import colorsys, os, socket, sys
def works(what):
    try:
        what()
    except (OSError, MemoryError):
        return False
    return True
own, parent = os.getpid(), {parent}
tried = dict(
    file=lambda: open({file!r}).read(),
    network=lambda: socket.socket(),
    signal=lambda: os.kill(parent, 0) if own > 2 or parent > 2 else None,
    memory=lambda: bytearray({memory}),
)
works(lambda: open({file!r} + ".new", "w"))
print(*(name for name, what in tried.items() if works(what)), *(sorted({{*os.environ}} - {{"HOME", "LANG", "PATH"}})))
"""


def select_level(levels: Sequence[str], settings: Settings, python: str, user: int | None) -> str:
    """Return the first of these levels that confines the canary. SandboxError: none does, with the reason for each."""
    reasons = []
    for level in levels:
        reason = _try_level(settings | {"level": level}, python, user)
        if not reason:
            return level
        reasons.append(f"{level}: {reason}")
    raise SandboxError(
        f"programs cannot be isolated here. {'; '.join(reasons)}. Allow user namespaces (docs/sandbox.md, Containers), "
        "or run programs with all your rights by level='none' and allow_unsafe=True"
    )


def _try_level(settings: Settings, python: str, user: int | None) -> str:
    """Run the canary; return the reason why the level does not work, "" if it does."""
    level = settings["level"]
    # The canary tries what a program must not do: read this file, write beside it, use memory, see its parent.
    with tempfile.NamedTemporaryFile() as file:
        os.chmod(file.name, 0o644)
        # Far beyond its limit; it is not written to, so that the level "none" does not fill the machine.
        memory = (settings["memory_mb"] << 20) * 4
        canary = _CANARY.format(parent=os.getpid(), file=file.name, memory=memory)
        try:
            worker = Worker(settings, python, user)
            try:
                header, bodies = worker.request({"kind": "run", "time_limit": 10.0}, canary.encode(), b"", limit=10.0)
                worker.settle()
            finally:
                worker.kill()
        except SandboxError as error:
            return str(error)
        written = file.name + ".new"
        escaped = os.path.exists(written)
        if escaped:
            os.unlink(written)
    out, error_text = (body.decode(errors="replace").strip() for body in bodies)
    if header["status"] != "ok":
        return f"a program could not run ({header['status']}: {error_text[-300:]})"
    # Without isolation this is as it should be.
    if (out or escaped) and level != "none":
        return f"a program was not prevented from: {out or 'write'}"
    return ""
