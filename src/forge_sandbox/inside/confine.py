"""Confinement of a forked process, in which a program then runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from . import limits, namespaces, seccomp
from .syscalls import call, die_with_parent, prctl
from .wire import Settings

# Written once confinement has succeeded, before the program starts.
BEGUN = b"+"
SETUP_FAILED = 125  # exit code if confinement failed
DUMPABLE = 4  # options of prctl
_NO_NEW_PRIVILEGES = 38


def confine(settings: Settings, descriptors: Sequence[int], run: Callable[[], None], setup: int) -> None:
    """Confine this process and run the program; never returns.

    Args:
        settings: those of `forge_sandbox.Sandbox`, with the level.
        descriptors: those that stay open besides 0, 1 and 2.
        run: the program; exits the process.
        setup: descriptor for `BEGUN`, or for the error if confinement fails.
    """
    try:
        os.setsid()
        die_with_parent()
        level = settings["level"]
        processes = settings["processes"]
        close_all_but(*descriptors, setup)
        tasks = None
        if level == "namespaces":
            # No other processes of this user in the namespace; without root the three processes above count.
            tasks = processes if os.geteuid() == 0 else processes + 3
            if os.geteuid() == 0:
                limits.drop_bounds()
                become_user(namespaces.NOBODY)
            os.chdir("/tmp")
        limits.limit(settings, tasks)
        if level != "none":
            # Order matters: no capability may be regained, and the filter must not forbid the calls above.
            limits.drop_capabilities()
            prctl(_NO_NEW_PRIVILEGES, 1)
            seccomp.install(seccomp.program(forks=processes > 1))
    except BaseException as error:
        os.write(setup, f"{type(error).__name__}: {error}".encode())
        os._exit(SETUP_FAILED)
    os.write(setup, BEGUN)
    os.close(setup)
    run()
    os._exit(0)


def become_user(user: int) -> None:
    """Drop root, for whom process limits and file permissions do not count."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    prctl(DUMPABLE, 1)  # otherwise it could not open its /proc/self


def close_all_but(*descriptors: int) -> None:
    """Close all descriptors except these and 0, 1 and 2."""
    start = 3
    for descriptor in (*sorted({*descriptors}), 1 << 31):
        if start < descriptor:
            call("close_range", start, descriptor - 1, 0)
        start = descriptor + 1
