"""Weaver as verifiers: the ensemble, which scores by one probability, and the model distilled from it."""

import asyncio
import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
import yaml

from forge.config import build, to_dict
from forge.config.yaml_files import read_yaml
from forge.observability import Reduce, record_metric
from forge.rewards.reward import report_missing
from forge.rewards.verifier import Scores
from forge_verifiers.config import ModelSettings, RewardModelSettings, VerifiersConfig
from forge_verifiers.panel import Panel

from .aggregator import AGGREGATOR, Aggregator, Json, load, restore_aggregator
from .binned import Online
from .table import ScoreTable

VERIFIERS = "verifiers.yaml"
DISTILLED = "distilled.json"
Form = Literal["probability", "logit", "threshold"]
CLIP = 4.0  # nats, odds of 55 to 1: beyond them the ensemble's calibration is not tested


def save_ensemble(folder: str | Path, verifiers: VerifiersConfig, aggregator: Aggregator) -> None:
    """Write the verifiers' configuration and the aggregator to a folder, which is created if needed.

    Only this user may read the configuration, since an address in it may contain a password.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)

    # Permissions before content; `touch` does not change those of a file that exists.
    file = folder / VERIFIERS
    file.touch(0o600)
    file.chmod(0o600)
    file.write_text(yaml.safe_dump(to_dict(verifiers), sort_keys=False))
    aggregator.save(folder / AGGREGATOR)


def load_ensemble(folder: str | Path) -> tuple[VerifiersConfig, Aggregator]:
    """Return the verifiers' configuration and the fitted aggregator that `save_ensemble` wrote to a folder.

    Raises:
        FileNotFoundError: one of the two files is missing.
        ValueError: one is invalid.
    """
    file = Path(folder) / VERIFIERS
    if not file.is_file():
        raise FileNotFoundError(f"{folder} is not an ensemble directory: it has no {VERIFIERS}")
    verifiers = build(VerifiersConfig, read_yaml(file) or {})
    verifiers.check_sources()
    return verifiers, load(Path(folder) / AGGREGATOR)


class Ensemble:
    """A verifier whose score is the probability, by a fitted ensemble of verifiers, that a response is right.

    A response that no verifier scored is unscored (NaN); missing scores of some verifiers are tolerated. In a
    configuration: `reward.functions: [{use: "forge_weaver:Ensemble", path: runs/ensemble}]`.

    Args:
        path: folder written by `save_ensemble`.
        form: of the score: "probability"; "logit", the log-odds clipped to +-`clip`; "threshold", 1 if the probability
            is at least `threshold`, else 0.
        threshold: probability, used if `form` is "threshold".
        clip: nats, used if `form` is "logit".
        veto: names of necessary verifiers. A response is rejected (0) if one of them scores it below 1/2. It is
            unscored if one of them gave no score and none rejects it.
        decide: names of sufficient verifiers. A response is rejected (0) if one of them scores it below 1/2, else
            accepted (1) if any of them scored it. A veto takes precedence; without a score by any of them the
            ensemble's probability holds.
        follow: number of scored groups after which the aggregator is updated (0: never). Each replica of a service
            learns from the groups that it scores.

    Raises:
        ValueError: an unknown form, or numbers out of range.
    """

    names = ("ensemble",)

    def __init__(
        self,
        path: str,
        *,
        form: Form = "probability",
        threshold: float = 0.5,
        clip: float = CLIP,
        veto: tuple[str, ...] = (),
        decide: tuple[str, ...] = (),
        follow: int = 0,
    ) -> None:
        self.form: Form = form
        self.threshold, self.clip = threshold, clip
        if form not in get_args(Form) or not 0 < threshold <= 1 or clip <= 0:
            raise ValueError(
                f"form must be one of {', '.join(get_args(Form))}, threshold above 0 and at most 1, clip above 0, "
                f"got {form}, {threshold}, {clip}"
            )
        self.path, self.learns = Path(path), follow > 0
        self._veto, self._decide, self._follow = tuple(veto), tuple(decide), follow
        self._seen: list[np.ndarray] = []
        self._learning = asyncio.Lock()
        self.panel: Panel | None = None
        self._logged: dict[str, set[str]] = {}

    @classmethod
    def over(cls, panel: Panel, aggregator: Aggregator, **settings: Any) -> Self:
        """Return an ensemble of a panel and a fitted aggregator in memory, which needs no `setup`.

        Raises:
            ValueError: the panel has not all verifiers of the aggregator.
        """
        ensemble = cls("", **settings)
        ensemble._open_ensemble(panel, aggregator)
        return ensemble

    @property
    def files(self) -> list[str]:
        """Return the paths of the files whose content decides scores."""
        return [str(self.path / name) for name in (VERIFIERS, AGGREGATOR)]

    def planned_models(self) -> list[ModelSettings]:
        """Return the models that `setup` loads, so that a plan can measure them.

        Raises:
            ValueError, FileNotFoundError: the folder has no ensemble.
        """
        return [] if self.panel is not None else load_ensemble(self.path)[0].planned_models()

    def check(self) -> None:
        """Check, without loading a model, that the folder has an ensemble that can be used as a reward.

        Raises:
            ValueError, FileNotFoundError: it has not.
        """
        verifiers, aggregator = load_ensemble(self.path)
        if getattr(aggregator, "one_right", False):
            raise ValueError(
                f"{self.path} was fitted with one_right, but any number of a policy's samples can be right: fit it "
                "without one_right"
            )
        if self.learns and not isinstance(aggregator, Online):
            raise ValueError(f"follow needs an ensemble of method online, got {aggregator.report.method}")
        names = verifiers.names
        for key, needed in (("path", aggregator.verifiers), ("veto", self._veto), ("decide", self._decide)):
            if missing := [name for name in needed if name not in names]:
                raise ValueError(
                    f"{key}: {', '.join(missing)} must be one of the ensemble's verifiers: {', '.join(names)}"
                )

    def setup(self) -> None:
        """Load the models, unless the ensemble was made by `over`.

        Raises:
            ValueError, OSError: the ensemble is invalid, or a model is missing.
        """
        if self.panel is None:
            verifiers, aggregator = load_ensemble(self.path)
            self._open_ensemble(verifiers.panel(), aggregator)

    def _open_ensemble(self, panel: Panel, aggregator: Aggregator) -> None:
        needed = [*aggregator.verifiers, *self._veto, *self._decide]
        if missing := [name for name in needed if name not in panel.names]:
            raise ValueError(f"the panel needs the verifiers {', '.join(missing)}, but has {', '.join(panel.names)}")
        self.panel, self.aggregator = panel, aggregator
        # The columns of each role in the panel's scores.
        self._columns, self._vetoing, self._deciding = (
            [panel.names.index(name) for name in names] for names in (aggregator.verifiers, self._veto, self._decide)
        )

    @property
    def progress(self) -> float:
        """Return a number that grows while verifiers work, by which a time limit tells slow from stuck."""
        return self.panel.progress if self.panel is not None else 0.0

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """Return the scores of the responses to one prompt, [responses, 1], in the form of the setting `form`."""
        assert self.panel is not None, "call setup() first"
        scores = await self.panel.score(prompt, responses, target)
        report_missing(self.panel, scores, self._logged)

        # All forms of one probability; the clip bounds what a single verifier's certainty can do.
        p = self.probabilities(scores)
        with np.errstate(divide="ignore"):
            logits = np.clip(np.log(p) - np.log1p(-p), -self.clip, self.clip)
        values = {"probability": p, "logit": logits, "threshold": np.where(p >= self.threshold, 1.0, 0.0)}[self.form]
        values = np.where(np.isnan(p), np.nan, values)

        ensemble_scores = scores.values[:, self._columns]
        if self.learns and not np.isnan(ensemble_scores).all():
            self._seen.append(ensemble_scores)
            async with self._learning:
                while len(self._seen) >= self._follow:
                    # Update a copy: concurrent calls must not see a partial update.
                    learned, groups = copy.deepcopy(self.aggregator), self._seen[: self._follow]
                    await asyncio.to_thread(learned.partial_fit, self._pad_table(groups))  # type: ignore[attr-defined]
                    self.aggregator, self._seen = learned, self._seen[len(groups) :]
                    record_metric("reward/alarms", len(learned.report.alarms), Reduce.MAX)

        # In reverse, so that the first reason of each response is kept.
        first_reason = {i: reason for (i, _), reason in reversed(scores.reasons.items())}
        unscored = map(int, np.flatnonzero(np.isnan(p)))
        return Scores(values[:, None], {(i, 0): f"no verifier scored it: {first_reason.get(i)}" for i in unscored})

    def probabilities(self, scores: Scores) -> np.ndarray:
        """Return each response's probability of being right, [responses], after `veto` and `decide`.

        It is NaN if no verifier scored the response, or the score of a vetoing verifier is missing.

        Args:
            scores: by the panel.
        """
        p = self.aggregator.predict_proba(self._pad_table([scores.values[:, self._columns]]))[0]
        decided, vetoes = scores.values[:, self._deciding], scores.values[:, self._vetoing]
        # In order of precedence, the last one wins: sufficient, missing, vetoed.
        p = np.where((decided >= 0.5).any(1), 1.0, p)
        p = np.where(np.isnan(vetoes).any(1), np.nan, p)
        return np.where((decided < 0.5).any(1) | (vetoes < 0.5).any(1), 0.0, p)

    async def close(self) -> None:
        """Close the verifiers of the ensemble."""
        if self.panel is not None:
            await self.panel.close()

    async def state_dict(self) -> Json:
        """Return the state for `load_state_dict`: the aggregator, and the scored groups since its last update."""
        async with self._learning:
            return {"aggregator": self.aggregator.state_dict(), "seen": list(self._seen)}

    async def load_state_dict(self, state: Json) -> None:
        """Restore a state of `state_dict`. ValueError: the state is of an ensemble of other verifiers."""
        learned = restore_aggregator(state["aggregator"])
        if learned.verifiers != self.aggregator.verifiers:
            raise ValueError(
                f"an ensemble of {', '.join(learned.verifiers)} was saved, but this ensemble has "
                f"{', '.join(self.aggregator.verifiers)}: resume with the ensemble that the run started with"
            )
        self.aggregator, self._seen = learned, list(state["seen"])

    def _pad_table(self, groups: Sequence[np.ndarray]) -> ScoreTable:
        """Return a table of groups, each the scores [responses, verifiers] of one prompt.

        Smaller groups are padded with absent responses.
        """
        sizes = np.array([len(group) for group in groups])
        present = np.arange(sizes.max()) < sizes[:, None]
        scores = np.full((*present.shape, len(self.aggregator.verifiers)), np.nan)
        scores[present] = np.concatenate(groups)
        return ScoreTable(scores, self.aggregator.verifiers, present=present)


class Distilled:
    """A verifier whose score is the calibrated probability by a model that `forge_weaver.distil.distil` trained.

    Args:
        path: the folder that `distil` wrote.
        name: of the verifier; by default the folder's name.
        device, dtype, batch_tokens: see `forge_verifiers.RewardModel`.
    """

    def __init__(
        self,
        path: str,
        *,
        name: str | None = None,
        device: str | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        batch_tokens: int = 8192,
    ) -> None:
        self.path, self.names = Path(path), (name or Path(path).name,)
        self._settings: dict[str, Any] = {"device": device, "dtype": dtype, "batch_tokens": batch_tokens}
        self.model: Any = None

    @property
    def files(self) -> list[str]:
        """Return the paths of the files whose content decides scores."""
        return [str(self.path / DISTILLED)]

    def planned_models(self) -> list[ModelSettings]:
        """Return the model that `setup` loads, so that a plan can measure it.

        Raises:
            FileNotFoundError: not the folder of a distilled verifier.
        """
        return [RewardModelSettings(path=str(self.path), **self._read_settings(), **self._settings)]

    def check(self) -> None:
        """Check that `path` is the folder of a distilled verifier. FileNotFoundError: it is not."""
        if not (self.path / DISTILLED).is_file():
            raise FileNotFoundError(f"{self.path} is not a distilled verifier: it has no {DISTILLED}")

    def setup(self) -> Self:
        """Load the distilled model. FileNotFoundError: `path` is not the folder of a distilled verifier."""
        from forge_verifiers import RewardModel

        self.model = RewardModel(self.path, self.names[0], **self._read_settings(), **self._settings)
        return self

    def _read_settings(self) -> dict[str, Any]:
        """Return how the model reads texts. FileNotFoundError: not the folder of a distilled verifier."""
        self.check()
        return json.loads((self.path / DISTILLED).read_text())["reading"]

    @property
    def progress(self) -> float:
        """Return a number that grows while the model works, by which a time limit tells slow from stuck."""
        return self.model.progress

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """Return the probabilities that the responses to one prompt are right, [responses, 1]."""
        return await self.model.score(prompt, responses, target)

    async def close(self) -> None:
        """Free the distilled model."""
        if self.model is not None:
            await self.model.close()
