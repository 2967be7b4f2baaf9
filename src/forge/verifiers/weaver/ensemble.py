"""An ensemble as a folder: which verifiers it asks, and how their scores become one probability."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import yaml

from ...config import ConfigError, Section, read, to_dict
from ..spec import VerifiersConfig
from .aggregator import AGGREGATOR, Aggregator, load
from .majority import Majority
from .online import Online

if TYPE_CHECKING:
    from .reward import WeaverReward

VERIFIERS = "verifiers.yaml"


def save_ensemble(folder: str | Path, verifiers: VerifiersConfig, aggregator: Aggregator) -> None:
    """Write both into a folder, which is made if it is not there."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / VERIFIERS).write_text(yaml.safe_dump(to_dict(verifiers), sort_keys=False))
    aggregator.save(folder / AGGREGATOR)


def load_ensemble(folder: str | Path) -> tuple[VerifiersConfig, Aggregator]:
    """The verifiers and the fitted aggregator.

    Raises:
        FileNotFoundError: one of the two files is missing; ValueError: one is broken.
    """
    file = Path(folder) / VERIFIERS
    if not file.is_file():
        raise FileNotFoundError(f"{folder} is no ensemble: it has no {VERIFIERS}")
    return read(VerifiersConfig, file), load(Path(folder) / AGGREGATOR)


@dataclass
class EnsembleConfig(Section):
    """The ensemble in the folder `path` as a reward, see `forge.verifiers.weaver.WeaverReward`."""

    path: str
    form: Literal["probability", "logit", "threshold"] = "probability"
    threshold: float = 0.5
    clip: float = 4.0
    veto: list[str] = field(default_factory=list)
    decide: list[str] = field(default_factory=list)
    follow: int = 0

    def validate(self) -> None:
        """ConfigError: a setting that does nothing or cannot be."""
        for name, form in (("threshold", "threshold"), ("clip", "logit")):
            if self.form != form and self[name] != getattr(EnsembleConfig, name):
                raise ConfigError(f"reward.ensemble.{name} does something only if reward.ensemble.form is {form}")
        if not 0 < self.threshold <= 1 or self.clip <= 0 or self.follow < 0:
            raise ConfigError(
                "reward.ensemble: threshold must be above 0 and at most 1, clip above 0, follow at least 0"
            )

    @property
    def files(self) -> list[str]:
        """What the folder holds of the ensemble itself."""
        return [str(Path(self.path) / name) for name in (VERIFIERS, AGGREGATOR)]

    def check(self) -> None:
        """ConfigError: the folder holds no such ensemble, or one whose verifiers cannot be had."""
        try:
            verifiers, aggregator = load_ensemble(self.path)
        except (ValueError, OSError) as error:
            raise ConfigError(f"reward.ensemble: {error}") from None
        if isinstance(aggregator, Majority):
            raise ConfigError("reward.ensemble: majority needs answers, which a reward has not: use answer_frequency")
        if self.follow and not isinstance(aggregator, Online):
            raise ConfigError(
                f"reward.ensemble.follow needs an ensemble of method online: this is {aggregator.report.method}"
            )
        names = verifiers.names
        for key, wanted in (("path", aggregator.verifiers), ("veto", self.veto), ("decide", self.decide)):
            if missing := [name for name in wanted if name not in names]:
                raise ConfigError(
                    f"reward.ensemble.{key}: {', '.join(missing)} is none of its verifiers: {', '.join(names)}"
                )

    def open(self) -> WeaverReward:
        """The reward, with its models loaded."""
        from .reward import WeaverReward

        verifiers, aggregator = load_ensemble(self.path)
        settings = {name: self[name] for name in self if name != "path"}
        return WeaverReward(verifiers.panel(), aggregator, **settings)
