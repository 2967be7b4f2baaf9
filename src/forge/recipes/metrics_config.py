"""The section `metrics`: trackers, profiles, and what numbers are compared with."""

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from ..config.sections import Section


class WandbConfig(Section):
    """Weights & Biases."""

    project: str
    """The project there."""
    entity: str | None = None
    """User or team; null: the default one of the API key."""
    name: str | None = None
    """Of the run; null: `run.name`."""
    group: str | None = None
    """Runs of one group are shown together."""
    tags: list[str] = Field(default_factory=list)
    """Of the run."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """`offline` writes to `wandb/` in the run's folder; `wandb sync` uploads it. Null: `WANDB_MODE`, else online."""


class ProfileConfig(Section):
    """`torch.profiler` ([watching.md](watching.md))."""

    steps: list[PositiveInt]
    """Those that are profiled; of a resumed run not its first."""
    services: list[str] = Field(default_factory=lambda: ["trainer"])
    """Whose processes."""


class MetricsConfig(Section):
    """Outputs in addition to `metrics.jsonl`, the console and the report ([watching.md](watching.md))."""

    tensorboard: bool = False
    """Also write TensorBoard events (`pip install tensorboard`)."""
    wandb: WandbConfig | None = None
    tracker: str | None = None
    """A tracker of your own: `package.module:Name` ([watching.md](watching.md#trackers))."""
    profile: ProfileConfig | None = None
    peak_tflops: PositiveFloat | None = None
    """TFLOP/s of one device, which `train/mfu` and `generator/mfu` are shares of; null: the data sheet's for a known
    GPU ([watching.md](watching.md))."""

    def profiles(self, step: int, folder: Path) -> dict[str, str]:
        """Return {service: folder of its profile} of a step; empty if the step is not profiled.

        Args:
            folder: of the run.
        """
        if self.profile is None or step not in self.profile.steps:
            return {}
        return dict.fromkeys(self.profile.services, str((folder / "profile" / f"step_{step:06d}").absolute()))
