"""The plan of a run that is about to start on GPUs: a line in its log, a warning where something does not fit."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...observability.console import log
from ...runtime.inventory import visible_gpus
from ..memory import readable
from ..placement import gpus_needed

if TYPE_CHECKING:
    from ..schema import TrainingRecipe
    from .components import Plan
    from .devices import Machines
    from .trainers import ComponentPlan

SECONDS = 2.5  # of this process, after which no other remedy is tried: it is not worth a longer start
DRIVER_TIMEOUT = 10.0  # seconds; without its persistence mode the driver starts first
MIB = 2**20


def log_plan(cfg: TrainingRecipe, model: str, find: Callable[[TrainingRecipe], Machines] | None = None) -> None:
    """Log what a run on GPUs will need of their memory; nothing where it uses none. Raises no error.

    Args:
        model: folder of the model that is trained.
        find: the GPUs of the run; by default those of this machine, by NVIDIA's driver.
    """
    if not gpus_needed(cfg):
        return
    until = time.process_time() + SECONDS
    try:
        machines = (find or gpus_here)(cfg)
        # Imported here: the trainer's code comes along, a second that runs on CPUs need not wait.
        from .components import make_plan

        plan = make_plan(cfg, Path(model), model, machines, until=until)
    # The plan is advice: whatever it stumbles over, the run may well do without.
    except Exception as error:
        reason = f"{error}".partition("\n")[0] or type(error).__name__
        log.info("memory on GPUs is not planned: %s", reason)
        return
    lacking = list(warnings_of(plan))
    for line in lacking:
        log.warning("%s", line)
    if not lacking:
        log.info("%s", fitting_line(plan))


def gpus_here(cfg: TrainingRecipe) -> Machines:
    """The GPUs of this machine that the run may use, without opening one; as small as the smallest.

    Raises:
        ValueError: they are on other machines, or parts of a GPU, or NVIDIA's driver does not describe them.
    """
    from .devices import Machines, device_of

    if cfg.cluster.configured_hosts is not None:
        raise ValueError("they are on cluster.hosts: try forge plan CONFIG --gpus 8xH100")
    names = visible_gpus()
    if any(name.startswith("MIG") for name in names):
        raise ValueError("they are parts of a GPU (MIG)")
    if shutil.which("nvidia-smi") is None:
        raise ValueError("nvidia-smi, which names them, is not there: try forge plan CONFIG --gpus 8xH100")
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    # It numbers all GPUs of the machine, of which a scheduler may have granted some.
    chosen = ["--id", ",".join(names)] if os.environ.get("CUDA_VISIBLE_DEVICES") else []
    answer = subprocess.run([*query, *chosen], capture_output=True, text=True, timeout=DRIVER_TIMEOUT, check=False)
    rows = [line.rpartition(",") for line in answer.stdout.splitlines() if line.strip()]
    if answer.returncode or not rows:
        raise ValueError(f"nvidia-smi failed: {answer.stderr.strip() or answer.stdout.strip()}")
    devices = [device_of(card.strip(), float(memory) * MIB) for card, _, memory in rows]
    return Machines(min(devices, key=lambda device: device.memory), len(names))


def fitting_line(plan: Plan) -> str:
    """The peak of every component on GPUs, and what makes it, in one line."""
    device = plan.machines.device
    parts = "; ".join(f"{part.name} {_described(part)}" for part in plan.components if part.with_gpus)
    return f"memory on GPUs, planned for {device.name} of {readable(device.memory)}: {parts}"


def warnings_of(plan: Plan) -> Iterator[str]:
    """A line for each component that does not fit, with what would."""
    for component in plan.components:
        if not component.with_gpus or component.fits:
            continue
        remedy = next((note for note in plan.notes if note.startswith(f"the {component.name} fits with")), "")
        yield (
            f"the {component.name} may run out of memory: planned are {_described(component)}, and of this "
            f"{plan.machines.device.name} {readable(component.bound)} can be used; {remedy}"
        )


def _described(component: ComponentPlan) -> str:
    parts = ", ".join(f"{name} {readable(size)}" for name, size in component.parts.items())
    moment = f"; most at: {component.moment}" if component.moment else ""
    limits = f"; {component.limits}" if component.limits else ""
    return f"{readable(component.total)} in each of {component.processes} process(es) ({parts}{moment}{limits})"
