"""Confinement of a forked process, in which a program then runs."""

import os
from collections.abc import Callable

from . import limits, namespaces, seccomp
from .syscalls import die_with_parent, make_call, prctl
from .wire import Settings

# What is written to `setup` once confinement has succeeded, before the program starts.
BEGUN = b"+"
SETUP_FAILED = 125  # exit code if confinement failed


def confine_and_run(settings: Settings, run: Callable[[int], None], setup: int) -> None:
    """Confine this process, run the program in it, and exit.

    Args:
        settings: arguments of `forge_sandbox.worker.Worker`.
        run: runs the program and exits the process; its argument is `setup`.
        setup: a descriptor, to which `BEGUN` is written, or the error if confinement fails.
    """
    try:
        os.setsid()
        die_with_parent()
        # All descriptors but this one and 0, 1 and 2.
        if setup > 3:
            make_call("close_range", 3, setup - 1, 0)
        make_call("close_range", setup + 1, (1 << 31) - 1, 0)
        tasks = None

        if settings["level"] == "namespaces":
            # The limit is for all processes of the user. As root, the program gets a separate user in its namespace;
            # otherwise the three processes above it belong to the same user, and count too.
            tasks = settings["processes"] + (3 if os.geteuid() else 0)
            if not os.geteuid():
                limits.drop_bounds()
                # For root, process limits and file permissions do not apply.
                os.setgroups([])
                os.setresgid(namespaces.NOBODY, namespaces.NOBODY, namespaces.NOBODY)
                os.setresuid(namespaces.NOBODY, namespaces.NOBODY, namespaces.NOBODY)
                # A change of the user clears PR_SET_DUMPABLE, without which a process cannot open its /proc/self.
                prctl(4, 1)

        os.chdir(settings["folder"])
        limits.limit_process(settings["limits"], tasks)
        if settings["level"] == "namespaces":
            # Last, as these calls need capabilities or are denied by the filter: everything else is done before.
            limits.drop_capabilities()
            prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
            seccomp.install_filter(
                seccomp.filter_program(forks=settings["processes"] > 1, network="network" in settings)
            )
    except BaseException as error:
        os.write(setup, f"{type(error).__name__}: {error}".encode())
        os._exit(SETUP_FAILED)

    os.write(setup, BEGUN)
    run(setup)
    os._exit(0)
