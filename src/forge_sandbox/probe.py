"""Selection of the isolation level: a canary program tries what must be blocked."""

from __future__ import annotations

import os
import tempfile

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


def select_level(level: str, is_unsafe: bool, settings: Settings, python: str, user: int | None) -> str:
    """Return the level at which programs run: "auto" is namespaces, or none where these do not confine the canary and
    `is_unsafe` accepts that. SandboxError: they do not, with the reason."""
    try:
        tried = "none" if level == "none" else "namespaces"
        escapes = _try_level(settings | {"level": tried}, python, user)
        # Without isolation they are as they should be.
        if not escapes or tried == "none":
            return tried
        reason = f"a program was not prevented from: {escapes}"
    except SandboxError as error:
        reason = str(error)

    if level == "auto" and is_unsafe:
        return "none"
    raise SandboxError(
        f"programs cannot be isolated here. {tried}: {reason}. Allow user namespaces (docs/sandbox.md, Containers), "
        "or run programs with all your rights by level='none' and allow_unsafe=True"
    )


def _try_level(settings: Settings, python: str, user: int | None) -> str:
    """Run the canary, which tries what a program must not do: read this file, write alongside it, use memory, see its
    parent. Return what it could, in words. SandboxError: it could not run."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        file = os.path.join(folder, "file")
        with open(file, "w"):
            os.chmod(file, 0o644)

        # Far beyond its limit; it is not written to, so that the level "none" does not fill the machine.
        memory = (settings["memory_mb"] << 20) * 4
        canary = _CANARY.format(parent=os.getpid(), file=file, memory=memory)
        worker = Worker(settings, python, user)
        try:
            header, (out, error) = worker.request({"time_limit": 10.0}, canary.encode(), b"", limit=10.0)
        finally:
            worker.kill()

        if header["status"] != "exited" or header["exit_code"]:
            raise SandboxError(f"a program could not run ({header['status']}: {error.decode(errors='replace')[-300:]})")
        return " ".join([*out.decode(errors="replace").split(), *(["write"] if os.path.exists(file + ".new") else [])])
