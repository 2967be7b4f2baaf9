"""Alerts: numbers of a run that deserve a look, each with advice."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from forge.observability.console import log

from .runs import rows, settings

WINDOW = 20  # steps that a judgement is based on: fewer vary too much
SCARCE = 2.0  # GB: less than a checkpoint of a small model

AUDIT = "audit.json"  # that of the run at its end
MISMATCH = "mismatch.json"  # the last comparison of engine and trainer, by `forge mismatch`

Rows = Sequence[Mapping[str, float]]


class Alert(NamedTuple):
    """`finding` is a fault in the numbers, `advice` a remedy to try."""

    finding: str
    advice: str

    def __str__(self) -> str:
        return f"{self.finding}. {self.advice}"


def alerts(rows: Rows, settings: Mapping[str, Any]) -> list[Alert]:
    """Return alerts, the most important first; none for a run of fewer than `WINDOW` steps.

    Args:
        rows: of metrics.jsonl, in the order of steps.
        settings: the configuration by dotted keys, see `forge_inspect.runs.settings`.
    """
    rows = [row for row in rows if row.get("step", 0) > 0]
    if len(rows) < WINDOW:
        return []
    start = rows[:WINDOW]
    window = rows[-WINDOW:]
    alerts = []

    # Groups whose rewards are equal have no gradient. Right answers and wrong formats look the same in the spread.
    reward = mean(window, "reward")
    spread = mean(window, "reward/std")
    solved = (mean(window, "accuracy") or 0.0) > 0.8
    no_signal = mean(window, "groups_without_signal")
    cut = mean(window, "generation/truncated")
    harder = "The prompts are solved: take harder ones, or stop"
    easier = "Take easier prompts, or more samples"
    if reward is not None and spread == 0:
        advice = "The reward may expect another format, or targets that responses never equal: compare them"
        if cut is not None and cut > 0.5:
            advice = f"{cut:.0%} of the completions were cut at max_tokens: raise it"
        elif solved:
            advice = harder
        elif reward > 0:
            advice = "Compare their rewards: the prompts may be solved, or the reward too coarse to tell samples apart"
        alerts.append(Alert(f"every sample of the last {WINDOW} steps had the reward {reward:.4g}", advice))
    elif no_signal is not None and no_signal > 0.8:
        equal = f"{no_signal:.0%} of the groups had equal rewards and taught nothing"
        alerts.append(Alert(equal, harder if solved else easier))

    # Overfitting: a fall of a tenth is beyond the noise of a few hundred held-out problems.
    held_out = [(row["eval/accuracy"], row["step"]) for row in rows if "eval/accuracy" in row]
    if held_out and (best := max(held_out))[0] - held_out[-1][0] > 0.1:
        fell = f"held-out accuracy fell from {best[0]:.3f} at step {best[1]:.0f} to {held_out[-1][0]:.3f}"
        alerts.append(Alert(fell, "Take a checkpoint from there, a lower learning rate or a KL term (grpo.beta)"))

    # Entropy that collapses while the reward stands still: the policy repeats itself and explores no more.
    before = mean(start, "train/entropy")
    entropy = mean(window, "train/entropy")
    earlier = mean(rows[-2 * WINDOW : -WINDOW], "reward")
    rises = reward is not None and earlier is not None and reward > earlier + 0.1 * (spread or 0.0)
    if before and entropy is not None and entropy < 0.1 * before and spread and not rises and not solved:
        fell = f"entropy fell to {entropy:.2g} nats, {entropy / before:.0%} of its start, and the reward stopped rising"
        alerts.append(Alert(fell, "Raise grpo.clip_high, add training.entropy_coef, or lower the learning rate"))

    # Engine and trainer compute the same model: a difference beyond rounding makes training off-policy.
    difference = mean(window, "train/engine_difference")
    if difference is not None and difference > 0.05:
        gap = f"log-probabilities of engine and trainer differ by {difference:.2g} nats on average"
        advice = "Use the same dtype in both, a correction, and generator.router_replay for mixtures"
        alerts.append(Alert(gap, f"`forge mismatch RUN --bisect` names the component. {advice}"))

    # A clipped token has no gradient: many mean steps that are too large.
    clipped = mean(window, "train/clip_fraction")
    if clipped is not None and clipped > 0.3:
        alerts.append(
            Alert(f"{clipped:.0%} of the tokens were clipped", "Lower the learning rate, or make fewer updates")
        )

    # Base models may sample special tokens, which fill the length and are invisible in texts.
    special = mean(window, "generation/special_tokens")
    if special is not None and special > 0.02:
        hidden = f"{special:.0%} of the sampled tokens are special ones such as <pad>, which texts do not show"
        advice = "Teach the form of answers first (forge.sft); a higher max_tokens makes more of them"
        alerts.append(Alert(hidden, advice))
    elif cut is not None and cut > 0.3 and spread:
        alerts.append(Alert(f"{cut:.0%} of the completions were cut at max_tokens", "Raise it, or shape the length"))

    # Generators that run ahead of the trainer waste what is dropped.
    bound = settings.get("async.max_policy_age")
    old = total(window, "dropped/too_old")
    trained = len(window) * (settings.get("training.batch_size") or 1)
    if bound and old > 0.1 * trained:
        dropped = f"{old:.0f} groups of the last {WINDOW} steps were older than async.max_policy_age = {bound}"
        alerts.append(Alert(dropped, "Raise it, with a correction, or use fewer generators"))

    unscored = total(rows, "dropped/unscored") + total(rows, "dropped/unscored_episodes")
    if unscored:
        lost = f"{unscored:.0f} groups or responses were left out because they had no score"
        alerts.append(Alert(lost, "The log has the reasons; each of them once"))

    # A full disk or memory ends the run.
    for name, resource, advice in (
        (
            "machine/disk_free_gb",
            "on the disk",
            "Remove old checkpoints, or lower checkpoint.keep and metrics.rollouts_mb",
        ),
        ("machine/memory_free_gb", "of memory", "Lower generator.slots, or use fewer processes"),
    ):
        free = rows[-1].get(name)
        if free is not None and free < SCARCE:
            alerts.append(Alert(f"{free:.1f} GB {resource} are left on the controller's machine", advice))

    names = sorted({name for row in rows for name in row if name.startswith("restarts/")})
    if names:
        services = ", ".join(f"{name.removeprefix('restarts/')} {total(rows, name):.0f} times" for name in names)
        alerts.append(Alert(f"components were lost and replaced: {services}", "The log says what ended each"))
    return alerts


def folder_alerts(folder: Path) -> list[Alert]:
    """Return what `forge mismatch` and the audit have found in a run's folder, as alerts."""
    return [*_mismatch_alerts(folder), *_audit_alerts(folder)]


def _audit_alerts(folder: Path) -> list[Alert]:
    try:
        faults = json.loads((folder / AUDIT).read_text())["faults"]
        return [Alert(str(fault)[:1000], "The audit of the run found it, see `forge audit`") for fault in faults[:5]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _mismatch_alerts(folder: Path) -> list[Alert]:
    try:
        verdict = json.loads((folder / MISMATCH).read_text())
        # The file is as good as the folder: others may have written it.
        if verdict["is_sound"] is not False:
            return []
        return [Alert(str(verdict["sentence"])[:1000], "`forge mismatch` named it from a recorded batch")]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def mean(rows: Rows, metric: str) -> float | None:
    """Mean of a metric over the rows that have it; None if no row has."""
    values = [row[metric] for row in rows if metric in row]
    return sum(values) / len(values) if values else None


def total(rows: Rows, metric: str) -> float:
    """Sum of a metric over all steps."""
    return sum(row.get(metric, 0.0) for row in rows)


def log_alerts(folder: Path, state: str) -> None:
    """Log the most important alerts of a run that ends."""
    for alert in alerts(rows(folder), settings(folder))[:3]:
        log.info("alert: %s", alert)
