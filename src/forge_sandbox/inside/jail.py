"""What programs see of the file system."""

from __future__ import annotations

import os
import sys

from .wire import Settings

# What programs need of the system: libraries and time zones, and nothing that tells about the machine.
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo")
# Devices without a state.
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


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
