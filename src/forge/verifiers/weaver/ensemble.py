"""An ensemble as a folder: which verifiers it asks, and how their scores become one probability."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import yaml
from pydantic import Field

from ...config import ConfigError, Section, read, to_dict
from ..spec import VerifiersConfig
from .aggregator import AGGREGATOR, Aggregator, load
from .auto import Auto
from .binned import BinnedDawidSkene
from .dependence import residual_correlation
from .majority import Majority
from .methods import check_one_right, make
from .normalise import NormalScores
from .online import Online
from .reward import Form, WeaverReward, check_form
from .table import ScoreTable

VERIFIERS = "verifiers.yaml"


def fit_table(
    table: ScoreTable,
    method: str = "auto",
    *,
    class_balance: float | None = None,
    one_right: bool = False,
    labelled: int = 0,
) -> Aggregator:
    """The aggregator that `make` gives, fitted; it sees the labels of the first `labelled` problems and no others.

    Raises:
        ValueError: the table has none of these labels or contradicts `one_right`, or what `make` and the fit refuse.
    """
    aggregator = make(method, class_balance, one_right, labelled)
    if one_right:
        check_one_right(table)
    if not 0 <= labelled <= len(table):
        raise ValueError(f"labelled must be 0 to {len(table)}, the number of problems")
    shown = table if table.labels is None else table.with_labels_of(np.arange(labelled))
    if labelled and not len(shown.labelled_problems()):
        raise ValueError(f"labelled is {labelled}, and there are no labels of these problems")
    aggregator.fit(shown)
    if isinstance(aggregator, BinnedDawidSkene):
        _tell_dependence(aggregator, shown)
    return aggregator


def _tell_dependence(aggregator: BinnedDawidSkene, table: ScoreTable) -> None:
    """What `Auto` would choose by, of a method that was asked for by name."""
    names = [name for name in aggregator.verifiers if name not in aggregator.report.dropped]
    p, scores = aggregator.predict_proba(table)[table.present], table.select(names).flat
    scored = ~np.isnan(p)
    rms, matrix = residual_correlation(NormalScores.fit(scores)(scores)[scored], p[scored])
    report = aggregator.report
    report.residual_correlation, report.correlated, report.correlation = rms, names, matrix.tolist()
    if rms > Auto.gate:
        aggregator.warn(
            f"the verifiers err together (residual correlation {rms:.2f}; independence is up to {Auto.gate:.2f}), and "
            "this method takes it that they do not: its probabilities are too sure; auto would take another"
        )


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
    verifiers = read(VerifiersConfig, file)
    verifiers.check_sources()
    return verifiers, load(Path(folder) / AGGREGATOR)


class EnsembleConfig(Section):
    """The ensemble in a folder as a reward, see `forge.verifiers.weaver.WeaverReward`."""

    path: str
    """Folder of the ensemble."""
    form: Form = "probability"
    """`probability`, `logit` (within +-`clip`), or `threshold` (1 where the probability is at least `threshold`)."""
    threshold: float = 0.5
    """Of form `threshold`."""
    clip: float = 4.0
    """Of form `logit`."""
    veto: list[str] = Field(default_factory=list)
    """Names of verifiers without which no response is right."""
    decide: list[str] = Field(default_factory=list)
    """Names of verifiers whose score is final."""
    follow: int = 0
    """Continue learning from every so many groups; 0: never."""

    def _check(self) -> None:
        for name, form in (("threshold", "threshold"), ("clip", "logit")):
            if self.form != form and self[name] != type(self).model_fields[name].default:
                raise ValueError(f"reward.ensemble.{name} does something only if reward.ensemble.form is {form}")
        check_form(self.form, self.threshold, self.clip, self.follow)

    @property
    def files(self) -> list[str]:
        """What the folder holds of the ensemble itself."""
        return [str(Path(self.path) / name) for name in (VERIFIERS, AGGREGATOR)]

    def check_sources(self) -> None:
        """ConfigError: the folder holds no such ensemble, or one whose verifiers cannot be had."""
        try:
            verifiers, aggregator = load_ensemble(self.path)
        except (ValueError, OSError) as error:
            raise ConfigError(f"reward.ensemble: {error}") from None
        if isinstance(aggregator, Majority):
            raise ConfigError("reward.ensemble: majority needs answers, which a reward has not: use answer_frequency")
        if getattr(aggregator, "one_right", False):
            raise ConfigError(
                "reward.ensemble was fitted with one_right, and of a policy's samples any number may be right: "
                "fit it without"
            )
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
        verifiers, aggregator = load_ensemble(self.path)
        settings = {name: self[name] for name in self.keys() if name != "path"}
        return WeaverReward(verifiers.panel(), aggregator, **settings)
