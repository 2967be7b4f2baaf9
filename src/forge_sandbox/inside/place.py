"""The environment of programs, prepared once: root file system, landlock rules, user."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

from . import confine, landlock, limits, namespaces

_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_USERS = 1 << 30  # far above assigned user ids


@dataclass
class Place:
    """Landlock `rules`, if used; `kept` descriptors that programs need; `readable` paths and the `links` on them."""

    rules: int | None = None
    kept: tuple[int, ...] = ()
    readable: tuple[str, ...] = ()
    links: dict[str, str] = field(default_factory=dict)

    def own(self, settings: dict[str, Any]) -> None:
        """Private mounts of a keeper at level namespaces."""
        namespaces.own_mounts(settings["file_mb"], self.readable, self.links)


def readable(settings: dict[str, Any]) -> list[str]:
    """Real paths of Python, system libraries and the settings, without those inside others.

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
    every = sorted({os.path.realpath(path) for path in (*python, *_SYSTEM, *settings["readable"])})
    found: list[str] = []
    for path in every:
        if os.path.exists(path) and not any(path.startswith(f"{other}/") for other in found):
            found.append(path)
    return [*found, *(path for path in DEVICES if os.path.exists(path))]


def links_to(settings: dict[str, Any]) -> dict[str, str]:
    """Targets of the symbolic links on the paths of the settings and in /."""
    found: dict[str, str] = {}
    for path in ("/bin", "/lib", "/lib64", *settings["readable"]):
        way, rest = "/", path.split("/")
        while rest:
            step = os.path.normpath(os.path.join(way, rest.pop(0)))
            if os.path.islink(step):
                found[step] = os.readlink(step)
                rest = found[step].split("/") + rest
                way = "/" if found[step].startswith("/") else way
            else:
                way = step
    return found


def prepare(settings: dict[str, Any]) -> Place:
    """Enter the environment. OSError: not permitted here."""
    level = settings["level"]
    if level == "namespaces":
        paths, links = tuple(readable(settings)), links_to(settings)
        namespaces.new_root(paths, links)
        return Place(readable=paths, links=links)
    if level == "landlock":
        rules = landlock.ruleset(readable(settings))
        return Place(rules, _leave_root())
    return Place()


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
    # Root of a container with one user: limits bind it as any other.


def _leave_root() -> tuple[int, ...]:
    """Drop root to an unused user. Returns descriptors of the sys.path folders that the new user cannot traverse to."""
    if os.geteuid():
        return ()
    opened = {path: os.open(path, os.O_PATH) for path in sys.path if os.path.isdir(path)}
    _drop_root()
    closed = {path: number for path, number in opened.items() if not os.access(path, os.R_OK | os.X_OK)}
    for path, number in opened.items():
        if path not in closed:
            os.close(number)

    def way(path: str) -> str:
        for folder, number in closed.items():
            if f"{path}/".startswith(f"{folder}/"):
                return f"/proc/self/fd/{number}{path[len(folder) :]}"
        return path

    if closed:
        sys.path[:] = map(way, sys.path)
        sys.path_importer_cache.clear()
        for module in list(sys.modules.values()):
            if isinstance(places := getattr(module, "__path__", None), list):
                places[:] = map(way, places)
    return tuple(closed.values())
