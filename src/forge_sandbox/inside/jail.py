"""The environment of programs, prepared once: root file system, landlock rules, user."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field

from . import confine, landlock, limits, namespaces
from .wire import Settings

# What programs need of the system: libraries and time zones, and nothing that tells about the machine.
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo")
# Devices without a state.
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_USERS = 1 << 30  # first of a range far above assigned user ids


@dataclass
class Jail:
    """A prepared environment.

    Attributes:
        rules: descriptor of landlock's rules, if used.
        descriptors: others that programs need.
        paths, links: readable paths, and the symbolic links on them.
    """

    rules: int | None = None
    descriptors: tuple[int, ...] = ()
    paths: tuple[str, ...] = ()
    links: dict[str, str] = field(default_factory=dict)

    def mount_private(self, settings: Settings) -> None:
        """Mount the private folders of a keeper at level namespaces."""
        namespaces.private_mounts(settings["file_mb"], self.paths, self.links)


def readable_paths(settings: Settings) -> list[str]:
    """Return the real paths of Python, system libraries and the settings, without those inside others.

    Raises:
        FileNotFoundError: a path of the settings does not exist.
    """
    for path in settings["readable"]:
        os.stat(path)
    python = [
        sys.executable,
        f"{sys.base_prefix}/{sys.platlibdir}",
        f"{sys.base_prefix}/lib",
        os.path.dirname(os.__file__),
    ]
    # Sorted: a folder comes before the paths in it, which need no separate mount.
    candidates = sorted({os.path.realpath(path) for path in (*python, *_SYSTEM, *settings["readable"])})
    paths: list[str] = []
    for path in candidates:
        if os.path.exists(path) and not any(path.startswith(f"{folder}/") for folder in paths):
            paths.append(path)
    return [*paths, *(path for path in DEVICES if os.path.exists(path))]


def links_to(settings: Settings) -> dict[str, str]:
    """Return the targets of the symbolic links on the paths of the settings and in /."""
    links: dict[str, str] = {}
    for path in ("/bin", "/lib", "/lib64", *settings["readable"]):
        # Part by part, as the kernel resolves a path: a link continues at its target.
        resolved = "/"
        parts = path.split("/")
        while parts:
            step = os.path.normpath(os.path.join(resolved, parts.pop(0)))
            if os.path.islink(step):
                links[step] = os.readlink(step)
                parts = links[step].split("/") + parts
                resolved = "/" if links[step].startswith("/") else resolved
            else:
                resolved = step
    return links


def prepare(settings: Settings) -> Jail:
    """Enter the environment. OSError: not permitted here."""
    level = settings["level"]
    if level == "namespaces":
        paths = tuple(readable_paths(settings))
        links = links_to(settings)
        namespaces.new_root(paths, links)
        return Jail(paths=paths, links=links)
    if level == "landlock":
        rules = landlock.ruleset(readable_paths(settings))
        return Jail(rules, _leave_root())
    return Jail()


def _drop_root() -> None:
    limits.drop_bounds()
    for user in (_USERS + os.getpid(), namespaces.NOBODY):
        try:
            return confine.become_user(user)
        except OSError:  # a container that maps fewer users
            continue
    with open("/proc/self/uid_map") as file:
        if "0" in file.read().split()[1::3]:
            raise OSError("dropping root failed: grant CAP_SETUID and CAP_SETGID, or run as another user")
    # Root of a container with one user: limits apply to it as to any other.


def _leave_root() -> tuple[int, ...]:
    """Drop root to an unused user. Return descriptors of the sys.path folders that the new user cannot reach."""
    if os.geteuid():
        return ()
    # Opened while it is allowed: the new user still reaches modules through these descriptors.
    opened = {path: os.open(path, os.O_PATH) for path in sys.path if os.path.isdir(path)}
    _drop_root()
    closed = {path: number for path, number in opened.items() if not os.access(path, os.R_OK | os.X_OK)}
    for path, number in opened.items():
        if path not in closed:
            os.close(number)

    def reachable(path: str) -> str:
        for folder, number in closed.items():
            if f"{path}/".startswith(f"{folder}/"):
                return f"/proc/self/fd/{number}{path[len(folder) :]}"
        return path

    # Modules that are already imported keep their folders in `__path__`.
    if closed:
        sys.path[:] = map(reachable, sys.path)
        sys.path_importer_cache.clear()
        for module in list(sys.modules.values()):
            folders = getattr(module, "__path__", None)
            if isinstance(folders, list):
                folders[:] = map(reachable, folders)
    return tuple(closed.values())
