"""Confinement of a forked process, in which a program then runs."""

import os
from collections.abc import Callable

from . import limits, namespaces, seccomp
from .syscalls import die_with_parent, make_call, prctl
from .wire import Settings

# Written once confinement has succeeded, before the program starts.
BEGUN = b"+"
SETUP_FAILED = 125  # exit code if confinement failed
_DUMPABLE = 4  # options of prctl
_NO_NEW_PRIVILEGES = 38


def confine_and_run(settings: Settings, run: Callable[[int], None], setup: int) -> None:
    """Confine this process and run the program; never returns.

    Args:
        settings: of `forge_sandbox.worker.Worker`.
        run: the program, which gets `setup`; exits the process.
        setup: descriptor for `BEGUN`, or for the error if confinement fails.
    """
    try:
        os.setsid()
        die_with_parent()
        _close_all_but(setup)
        tasks = None

        if settings["level"] == "namespaces":
            # No other processes of this user in the namespace; without root the three processes above count.
            tasks = settings["processes"] + (3 if os.geteuid() else 0)
            if not os.geteuid():
                limits.drop_bounds()
                _become_user(namespaces.NOBODY)

        os.chdir(settings["folder"])
        limits.limit_process(settings["limits"], tasks)
        if settings["level"] == "namespaces":
            # Order matters: no capability may be regained, and the filter must not forbid the calls above.
            limits.drop_capabilities()
            prctl(_NO_NEW_PRIVILEGES, 1)
            seccomp.install_filter(
                seccomp.filter_program(forks=settings["processes"] > 1, network="network" in settings)
            )
    except BaseException as error:
        os.write(setup, f"{type(error).__name__}: {error}".encode())
        os._exit(SETUP_FAILED)

    os.write(setup, BEGUN)
    run(setup)
    os._exit(0)


def _become_user(user: int) -> None:
    """Drop root, for whom process limits and file permissions do not count."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    prctl(_DUMPABLE, 1)  # otherwise it could not open its /proc/self


def _close_all_but(descriptor: int) -> None:
    """Close all descriptors except this one and 0, 1 and 2."""
    if descriptor > 3:
        make_call("close_range", 3, descriptor - 1, 0)
    make_call("close_range", descriptor + 1, (1 << 31) - 1, 0)
