"""The machines of a run: their section, and the checks that its services fit on them, before anything starts."""

import os
from pathlib import Path
from secrets import token_hex
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

from pydantic import NonNegativeFloat

from ..config.sections import Section
from ..runtime.controller.placement import machines_module
from ..runtime.inventory import VISIBLE, visible_gpus
from ..runtime.names import HOSTS

if TYPE_CHECKING:
    from .schema import TrainingRecipe


# What takes more GPUs, of any recipe.
RAISE = "raise services.trainer.procs or services.generator.num_replicas (with_gpus: true)"


def check_hosts(cfg: "TrainingRecipe") -> None:
    """Check that all services fit on the hosts of the run, or on this machine if it has no others.

    Raises:
        ValueError: lists what each host has free.
    """
    hosts = cfg.cluster.configured_hosts
    if hosts is None:
        check_gpus(cfg)
    else:
        machines_module().check_room(hosts, cfg.placements())


def check_shared(cfg: "TrainingRecipe", model: str) -> None:
    """Check that all hosts see the model's folder, and also `run.root` if a trainer on a host writes checkpoints there.

    Raises:
        ValueError: names the host and the folder.
    """
    on_hosts = {
        setting.rpartition(".")[2]
        for setting, options in cfg.placements().items()
        if options["host"] or options["hosts"] is not None or options["with_gpus"]
    }
    if cfg.cluster.configured_hosts is None or not on_hosts:
        return

    root = Path(cfg.run.root).absolute()
    root.mkdir(parents=True, exist_ok=True)

    # A file with a random text shows whether a host sees this folder, and not another one with the same path.
    with NamedTemporaryFile("w", dir=root, prefix=".forge-", suffix=".tmp") as mark:
        token = token_hex(8)
        mark.write(token)
        mark.flush()
        files = {Path(model) / "config.json": (Path(model) / "config.json").read_text()}
        if on_hosts & {"trainer", "critic"}:
            files[Path(mark.name)] = token
        machines_module().check_files(cfg.cluster.configured_hosts, files)


def gpus_needed(cfg: "TrainingRecipe") -> dict[str, int]:
    """Return the number of GPUs that each component of a run takes, by its placement setting without `services.`, as
    {"trainer": 2, "models.rival.trainer": 1}. Components without GPUs are left out.

    Services that share processes share their GPUs, which count for the first of them.
    """
    needed: dict[str, int] = {}
    shares: set[str] = set()
    for setting, options in cfg.placements().items():
        name = setting.removeprefix("services.")
        share = options["share"]
        if not options["with_gpus"]:
            continue
        if share is None:
            needed[name] = options["procs"] * options["num_replicas"] * options["gpus_per_proc"]
        elif share not in shares:
            shares.add(share)
            needed[name] = options["share_procs"] * options["gpus_per_proc"]
    return needed


def check_gpus(cfg: "TrainingRecipe") -> None:
    """Check that this machine has as many GPUs as the services take.

    Raises:
        ValueError: names the services and the settings to change.
    """
    needed = gpus_needed(cfg)
    total = sum(needed.values())
    available = len(visible_gpus()) if needed else 0
    if total <= available:
        return

    settings = {name: name if "." in name else f"services.{name}" for name in needed}
    counts = ", ".join(f"{settings[name]} {count}" for name, count in needed.items())

    # Which environment variable hides GPUs, such as CUDA_VISIBLE_DEVICES.
    limit = next((f" ({name}={os.environ[name]})" for name in VISIBLE if os.environ.get(name)), "")
    share = "set colocated to true, " if len(needed) > 1 and "colocated" in type(cfg).model_fields else ""
    without_gpus = " ".join(f"--{setting}.with_gpus false" for setting in settings.values())
    raise ValueError(
        f"{total} GPUs are needed ({counts}) and this machine has {available}{limit}: lower procs or num_replicas, "
        f"{share}or set with_gpus to false ({without_gpus})"
    )


class ClusterConfig(Section):
    """Other machines, each with a `forge worker` ([cluster.md](start/cluster.md)). Services with `hosts` or `with_gpus`
    are placed there."""

    hosts: list[str] | str | None = None
    """HOST:PORT of each worker, or the path of a file with one a line, or of the folder that workers register in; null:
    FORGE_HOSTS, which launchers set; without it this machine is the only one."""
    wait: NonNegativeFloat = 600.0
    """Seconds that a service without any replica waits for a host; services with others continue with those."""

    @property
    def configured_hosts(self) -> list[str] | str | None:
        """Return the hosts of this run, as in `hosts`; None if this machine is the only one."""
        return self.hosts or os.environ.get(HOSTS) or None
