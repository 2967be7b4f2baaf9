"""`forge doctor`: examine this machine, the hosts of a run, or a reward."""

import argparse
import os
import resource
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from forge.cli.subparsers import Subparsers, add_command
from forge.runtime.inventory import (
    OPEN_FILES,
    SHARED_MEMORY,
    VISIBLE,
    free_shared_memory,
    memory_limit,
    package_versions,
    visible_gpus,
)

DRIVER_TIMEOUT = 30.0  # seconds; the driver may have to wake its GPUs


def add_to(commands: Subparsers) -> None:
    """Add the command `forge doctor` to the parser."""
    add_command(
        commands,
        "doctor",
        "examine this machine, the hosts of a run, or a reward",
        "cluster --hosts node1,node2 --folder runs",
        run,
        [
            ("target", {"nargs": "?", "choices": ["machine", "cluster", "reward"], "default": "machine"}),
            ("reward", {"nargs": "?", "help": "of doctor reward: package.module:name"}),
            ("--hosts", {"help": "as cluster.hosts; default: FORGE_HOSTS"}),
            ("--folder", {"type": Path, "help": "that all hosts should see, such as runs"}),
            ("--data", {"help": "of doctor reward: rows for it, a file, folder or hub id"}),
            ("--prompt-field", {"help": "the column of the prompt; default: as dataset.prompt_field"}),
            ("--target-field", {"default": "answer", "help": "the column of the target, default: answer"}),
            ("--target-pattern", {"help": "as dataset.target_pattern, such as '#### (.*)'"}),
            ("--timeout", {"type": float, "default": 10.0, "help": "seconds of a call"}),
        ],
    )


def run(args: argparse.Namespace) -> None:
    """Examine the target and print a report; exit code 1 if there is a problem."""
    # Imports are local: `forge doctor machine` must also work where torch does not.
    if args.target == "machine":
        count = 0
        for name, value, problem in list_findings():
            count += bool(problem)
            print(f"{name:24} {value}" + (f"\n{'':24} PROBLEM: {problem}" if problem else ""))
        if count:
            raise SystemExit(1)
    elif args.target == "reward":
        from ..reward_doctor.examine import examine_reward

        examine_reward(args)
    else:
        from forge.runtime.controller.placement import machines_module

        try:
            lines, problems = machines_module().examine_hosts(args.hosts, args.folder)
        except (ValueError, OSError, ImportError, RuntimeError) as error:
            raise SystemExit(f"error: {error}") from error

        print("\n".join([*lines, *(f"problem: {problem}" for problem in problems)]))
        if problems:
            raise SystemExit(1)


def list_findings() -> Iterator[tuple[str, str, str]]:
    """Yield a finding on each property of this machine that a run needs: its name, its value, and a problem with its
    fix, or "" if there is none."""
    yield "machine", f"{len(os.sched_getaffinity(0))} cores, {memory_limit() / 1e9:.0f} GB", ""
    yield "versions", ", ".join(f"{name} {version}" for name, version in package_versions().items()), ""
    free = free_shared_memory()
    problem = "weights reach generators through it: enlarge it, in a container with --shm-size=8g"
    yield "/dev/shm", f"{free / 1e9:.1f} GB free", problem if free < SHARED_MEMORY else ""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    problem = f"raise the limit: ulimit -n {OPEN_FILES}" if soft < OPEN_FILES else ""
    yield "open files of a process", f"{soft:,}", problem

    driver, visible = driver_gpus(), tuple(visible_gpus())
    yield "GPUs", *check_accelerators(visible, driver)

    # On a GPU attention is always compiled, elsewhere with training.compile.
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    is_needed = bool(driver or visible)
    problem = "on a GPU attention is compiled: install gcc, and python3-dev"
    yield "C compiler", compiler or "none", problem if is_needed and not compiler else ""
    yield "Python.h", str(header), problem if is_needed and not header.is_file() else ""


def driver_gpus() -> list[str]:
    """Return a text for each GPU that NVIDIA's driver lists, with name, memory and driver version; none without it."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    process = subprocess.run(query, capture_output=True, text=True, timeout=DRIVER_TIMEOUT, check=False)
    return [] if process.returncode else [line.strip() for line in process.stdout.splitlines() if line.strip()]


def check_accelerators(visible: tuple[str, ...], driver: list[str]) -> tuple[str, str]:
    """Compare the GPUs that torch can use with those of the driver and of environment variables.

    Args:
        visible: GPUs that an environment variable such as CUDA_VISIBLE_DEVICES names.
        driver: a text for each GPU that the driver lists.

    Returns:
        A text on all three, and a problem with its fix, or "".
    """
    import torch

    count = torch.accelerator.device_count()
    built = torch.version.cuda or torch.version.hip
    names = "; ".join(dict.fromkeys(driver))
    value = f"torch {torch.__version__} sees {count}" + (f", the driver {len(driver)} ({names})" if driver else "")
    # With such a variable, as a scheduler sets it, torch may rightly see fewer GPUs than the driver.
    variable = next((name for name in VISIBLE if os.environ.get(name)), None)
    if count < len(visible) or (driver and not count and not variable):
        expected = f"{variable} names {len(visible)}" if variable else "this machine has some"
        fix = "check the driver" if built else "this torch is built for CPUs: run scripts/install.sh"
        return value, f"{expected}, and torch sees {count}: {fix}"
    return value, ""
