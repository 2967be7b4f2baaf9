"""Where programs run, made once for all of them: the root they see, the rules for files, the user."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

from . import confine, landlock, namespaces

_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_USERS = 1 << 30  # far above any that a machine has given to somebody


@dataclass
class Place:
    """`rules` of landlock, where they are made; `kept` descriptors that programs need; `readable` files and folders,
    and the `links` on the way to them."""

    rules: int | None = None
    kept: tuple[int, ...] = ()
    readable: tuple[str, ...] = ()
    links: dict[str, str] = field(default_factory=dict)

    def own(self, settings: dict[str, Any]) -> bool:
        """The part that each keeper has for itself, at level namespaces. Whether it can see its processes."""
        return namespaces.own_mounts(settings["file_mb"], self.readable, self.links)


def readable(settings: dict[str, Any]) -> list[str]:
    """Python, the libraries of the system, and what the settings say, without links and what lies in another.

    FileNotFoundError: something of the settings is not there.
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
    """The links on the ways to what the settings say, and those that systems have: where each of them leads."""
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
    """Go there. OSError: the machine does not let this user."""
    level = settings["level"]
    if level == "namespaces":
        paths, links = tuple(readable(settings)), links_to(settings)
        namespaces.new_root(paths, links)
        return Place(readable=paths, links=links)
    if level == "landlock":
        rules = landlock.ruleset(readable(settings))
        return Place(rules, _leave_root())
    return Place()


def _become_nobody() -> None:
    for user in (_USERS + os.getpid(), namespaces.NOBODY):
        try:
            return confine.become_user(user)
        except OSError:  # a container that has fewer users
            continue
    with open("/proc/self/uid_map") as file:
        if "0" in file.read().split()[1::3]:
            raise OSError("root cannot become another user here: give it CAP_SETUID and CAP_SETGID, or do not be root")
    # The only user of a container, whom limits bind as they do any other.


def _leave_root() -> tuple[int, ...]:
    """Become a user whom nobody else is. What is open of Python's folders, if the way to them is closed to others."""
    if os.geteuid():
        return ()
    opened = {path: os.open(path, os.O_PATH) for path in sys.path if os.path.isdir(path)}
    _become_nobody()
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
