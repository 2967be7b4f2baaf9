"""`forge doctor`: examine this machine, the hosts of a run, or a reward."""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from forge.cli.subparsers import Subparsers
from forge.runtime.inventory import (
    OPEN_FILES,
    SHARED_MEMORY,
    VISIBLE,
    free_shared_memory,
    memory_limit,
    versions,
    visible_gpus,
)
from forge.system.files import cache_folder

from . import Option, add_command

TEXT = "examine this machine, the hosts of a run, or a reward"


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    options: list[Option] = [
        ("target", {"nargs": "?", "choices": ["machine", "cluster", "reward"], "default": "machine"}),
        ("reward", {"nargs": "?", "help": "of doctor reward: package.module:name"}),
        ("--hosts", {"help": "as cluster.hosts; default: FORGE_HOSTS"}),
        ("--folder", {"type": Path, "help": "that all hosts should see, such as runs"}),
        ("--data", {"help": "of doctor reward: rows for it, a file, folder or hub id"}),
        ("--prompt-field", {"help": "the column of the prompt; default: as dataset.prompt_field"}),
        ("--target-field", {"default": "answer", "help": "the column of the target, default: answer"}),
        ("--target-pattern", {"help": "as dataset.target_pattern, such as '#### (.*)'"}),
        ("--timeout", {"type": float, "default": 10.0, "help": "seconds of a call"}),
    ]
    add_command(commands, "doctor", TEXT, "cluster --hosts node1,node2 --folder runs", run, options)


def run(args: argparse.Namespace) -> None:
    """Print a report; exit code 1 if there is a problem."""
    if args.target == "reward":
        from ..reward_doctor.examine import examine_reward

        examine_reward(args)
        return
    if args.target == "machine":
        examine_machine()
        return
    # Imported here: `forge doctor` must also work where torch does not.
    from forge.runtime.controller.placement import machines_module

    try:
        diagnosis = machines_module().examine(args.hosts, args.folder)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        raise SystemExit(f"error: {error}") from error
    print(diagnosis.render())
    if diagnosis.problems:
        raise SystemExit(1)


def examine_machine() -> None:
    """Print a line for each finding about this machine."""
    problems = 0
    for finding in findings():
        problems += bool(finding.problem)
        print(
            f"{finding.name:24} {finding.value}" + (f"\n{'':24} PROBLEM: {finding.problem}" if finding.problem else "")
        )
    if problems:
        raise SystemExit(1)


DRIVER_TIMEOUT = 30.0  # seconds; the driver may have to wake its GPUs


class Finding(NamedTuple):
    """One line of the report; `problem` is a fault with its remedy, or empty."""

    name: str
    value: str
    problem: str = ""


def findings() -> Iterator[Finding]:
    """Check everything about this machine that a run needs."""
    gpus = tuple(visible_gpus())
    yield Finding("machine", f"{len(os.sched_getaffinity(0))} cores, {memory_limit() / 1e9:.0f} GB")
    yield Finding("versions", ", ".join(f"{name} {version}" for name, version in versions().items()))
    yield shared_memory(free_shared_memory())
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    problem = f"raise the limit: ulimit -n {OPEN_FILES}" if soft < OPEN_FILES else ""
    yield Finding("open files of a process", f"{soft:,}", problem)
    driver = driver_gpus()
    yield accelerators(gpus, driver)
    yield from compilers(needed=bool(driver or gpus))


def shared_memory(free: int) -> Finding:
    """Check /dev/shm, through which weights reach the generators."""
    problem = ""
    if free < SHARED_MEMORY:
        problem = "weights reach generators through it: enlarge it, in a container with --shm-size=8g"
    return Finding("/dev/shm", f"{free / 1e9:.1f} GB free", problem)


def driver_gpus() -> list[str]:
    """Return the GPUs that NVIDIA's driver lists: name, memory and the driver's version; none without it."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    process = subprocess.run(query, capture_output=True, text=True, timeout=DRIVER_TIMEOUT, check=False)
    return [] if process.returncode else [line.strip() for line in process.stdout.splitlines() if line.strip()]


def accelerators(visible: tuple[str, ...], driver: list[str]) -> Finding:
    """Compare the GPUs that torch can use with those that the driver and a scheduler's variables name."""
    import torch

    count = torch.accelerator.device_count()
    built = torch.version.cuda or torch.version.hip
    names = "; ".join(dict.fromkeys(driver))
    value = f"torch {torch.__version__} sees {count}" + (f", the driver {len(driver)} ({names})" if driver else "")
    # A scheduler may restrict the GPUs: then fewer than the driver's are as they should be.
    variable = next((name for name in VISIBLE if os.environ.get(name)), None)
    problem = ""
    # In the order in which a person would look: driver, build, library.
    if count < len(visible):
        problem = f"{variable or 'this machine'} names {len(visible)}, and torch sees {count}: "
        problem += "check the driver" if built else "this torch is built for CPUs: run scripts/install.sh"
    elif driver and not count and not variable:
        problem = "torch sees none of them: "
        problem += "its build does not fit the driver" if built else "it is built for CPUs: run scripts/install.sh"
    elif count and torch.version.cuda and not torch.distributed.is_nccl_available():
        problem = "this torch has no NCCL: several GPUs cannot train together"
    return Finding("GPUs", value, problem)


def compilers(*, needed: bool) -> Iterator[Finding]:
    """Check the compiler and headers of torch.compile: on a GPU attention is always compiled."""
    # As torch does, which takes CC before it looks for others.
    preferred = os.environ.get("CC")
    names = (preferred,) if preferred else ("cc", "gcc", "clang")
    compiler = next(filter(None, map(shutil.which, names)), None)
    reason = "on a GPU attention is compiled" if needed else "training.compile needs it"
    missing = "" if compiler else f"{reason}: install gcc" + (f"; CC is {preferred}" if preferred else "")
    yield Finding("C compiler", compiler or "none", missing if needed else "")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = "" if header.is_file() else f"{reason}: install python3-dev, or a Python with its headers"
    yield Finding("Python.h", str(header) if header.is_file() else "none", missing if needed else "")
    # The folder may not exist yet: then the nearest one above it must be writable.
    cache = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache_folder())
    existing = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    closed = "" if os.access(existing, os.W_OK) else "compiled kernels cannot be kept: set TORCHINDUCTOR_CACHE_DIR"
    yield Finding("compiled kernels", str(cache), closed)
