"""`forge.observability.metric_actors` of torchforge: a logger that merges the metrics of all processes by steps.

A recipe needs none: `record_metric` in any process reaches the run's folder and its trackers.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from forge.runtime.controller import ForgeActor, Local, drain_metrics, endpoint

log = logging.getLogger("forge.metrics")
BACKENDS = ("console", "wandb")

_logger: Local | None = None


class MetricLogger(ForgeActor):
    """Logger of the metrics of all processes to the backends of a section `metric_logging`.

    It runs in the controller, which can reach all other processes. Without backends it writes to the console.
    """

    def __init__(self) -> None:
        self.writes_console = True
        self.run: Any = None

    @endpoint
    async def init_backends(self, config: Mapping[str, Mapping[str, Any]]) -> None:
        """Start with the backends of a configuration: `{"console": {}, "wandb": {"project": ..., "group": ...}}`.

        Raises:
            ValueError: another backend, or a logging_mode other than global_reduce.
            ModuleNotFoundError: wandb is not installed.
        """
        for name, section in config.items():
            if name not in BACKENDS:
                raise ValueError(f"metric_logging.{name} is unknown: the backends are {', '.join(BACKENDS)}")
            mode = (section or {}).get("logging_mode", "global_reduce")
            if mode != "global_reduce":
                raise ValueError(
                    f"metric_logging.{name}.logging_mode {mode} is unsupported: metrics are merged over all ranks, set "
                    "global_reduce"
                )

        # With no backend, write to the console, so that the metrics are not lost.
        self.writes_console = "console" in config or not config
        if "wandb" in config:
            import wandb

            options = {name: value for name, value in config["wandb"].items() if name != "logging_mode"}
            self.run = wandb.init(**options)

    @endpoint
    async def flush(self, global_step: int) -> dict[str, float]:
        """Write the metrics that were recorded since the last call as those of a step, and return them by name."""
        # Merged over processes, with the same result however the values are split over them.
        moments = (await drain_metrics()).moments
        # As in torchforge, a name is without its reduction, unless it was recorded with several.
        repeated = Counter(name for name, _ in moments)
        values = {
            name if repeated[name] == 1 else f"{name}/{reduction.value}": numbers.reduce(reduction)
            for (name, reduction), numbers in moments.items()
        }
        if self.writes_console:
            lines = "".join(f"\n  {name}: {value:g}" for name, value in sorted(values.items()))
            log.info("step %d%s", global_step, lines)
        if self.run is not None:
            self.run.log(values, step=global_step)
        return values

    @endpoint
    async def finish(self) -> None:
        """End the run of Weights & Biases, as `forge.controller.provisioner.shutdown` does."""
        self.teardown()

    def teardown(self) -> None:
        """End the run of Weights & Biases; the next `get_or_create_metric_logger` makes a new logger."""
        global _logger
        if self.run is not None:
            self.run.finish()
        self.run = None
        _logger = None


async def get_or_create_metric_logger(proc_mesh: object = None, process_name: str | None = None) -> Local:
    """Return the metric logger of this controller, which is made on first use.

    Args:
        proc_mesh, process_name: not used; accepted for programs of torchforge.
    """
    global _logger
    if _logger is None:
        _logger = await MetricLogger.as_local()
    return _logger
