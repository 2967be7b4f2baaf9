"""Alerts: sentences on suspicious metrics of a run, each with advice."""

from collections.abc import Mapping
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

from forge.observability.console import log
from forge.observability.lines import parse_line
from forge.system.files import is_plain

from .reference import CAUSES, Rows, find_reference
from .runs import read_metric_rows, read_settings

WINDOW = 20  # the last steps that an alert is about; a trend needs as many, since the mean of fewer varies too much
FEWEST = 3  # steps that an alert on rewards needs: a step has few groups, while its tokens and completions are many
MAX_BYTES = 1 << 20  # of a file with the result of `forge mismatch` or of an audit
SCARCE = 2.0  # GB of free disk or memory: less than a checkpoint of a small model

AUDIT = "audit.json"  # written at the end of the run
MISMATCH = "mismatch.json"  # the last comparison of engine and trainer, by `forge mismatch`

# Why the agents of a run failed, by the metric of their share.
FAILURES = {
    "crashed": "crashed",
    "timeout": "timed out",
    "infrastructure": "were lost before a first request or with their environment",
    "max_turns": "hit episode.max_turns",
    "max_tokens": "hit episode.max_tokens",
}


class Alert(NamedTuple):
    """Finding about a run and advice, each one sentence; the finding has no full stop."""

    finding: str
    advice: str

    def __str__(self) -> str:
        return f"{self.finding}. {self.advice}"


def list_alerts(rows: Rows, settings: Mapping[str, Any]) -> list[Alert]:
    """Return the alerts of a run, the most important first.

    Shares of tokens and completions, lost components and the machine count from the first row, rewards from `FEWEST`
    steps, held-out accuracy and entropy from `WINDOW`.

    Args:
        rows: of metrics.jsonl, in the order of steps, each a number by the name of the metric.
        settings: the configuration by dotted keys, see `forge_inspect.runs.read_settings`.
    """
    newest = rows[-1] if rows else {}
    names = sorted({name for row in rows for name in row if name.startswith("restarts/")})
    services = ", ".join(f"{name.removeprefix('restarts/')} {total_of_metric(rows, name):.0f} times" for name in names)

    rows = [row for row in rows if row.get("step", 0) > 0]
    window = rows[-WINDOW:]
    enough = window if len(rows) >= FEWEST else []
    reward, spread = (mean_of_metric(enough, name) for name in ("reward", "reward/std"))
    entropy = mean_of_metric(window, "train/entropy")
    cut, special = (mean_of_metric(window, f"generation/{name}") for name in ("truncated", "special_tokens"))
    difference, clipped = (mean_of_metric(window, f"train/{name}") for name in ("engine_difference", "clip_fraction"))
    no_signal = mean_of_metric(enough, "groups_without_signal")
    first_reward, first_accuracy = (mean_of_metric(rows[:WINDOW], name) for name in ("reward", "accuracy"))
    accuracy = mean_of_metric(window, "accuracy")
    is_solved = accuracy > 0.8
    harder = "The prompts are solved: take harder ones, or stop"

    # Advice for rewards that are all equal, which give no gradient: all answers may be right, or all fail the format.
    if cut > 0.5:
        compare = f"{cut:.0%} of the completions were cut at max_tokens: raise it"
    elif is_solved:
        compare = harder
    elif reward > 0:
        compare = "Compare their rewards: the prompts may be solved, or the reward too coarse to tell samples apart"
    else:
        compare = "The reward may expect another format, or targets that responses never equal: compare them"

    # A fall of a tenth is beyond the noise of a few hundred held-out problems.
    held_out = [(row["eval/accuracy"], row["step"]) for row in rows if "eval/accuracy" in row]
    held_out = held_out if held_out and len(rows) >= WINDOW else [(nan, nan)]
    best, last = max(held_out), held_out[-1][0]

    # Entropy that collapses while the reward does not rise: the policy repeats itself and no longer explores.
    before = mean_of_metric(rows[:WINDOW], "train/entropy")
    rises = reward > mean_of_metric(rows[-2 * WINDOW : -WINDOW], "reward") + 0.1 * spread
    collapsed = entropy < 0.1 * before and spread > 0 and not rises and not is_solved
    bound = settings.get("async.max_policy_age")
    old = total_of_metric(window, "dropped/too_old")
    trained = len(window) * (settings.get("training.batch_size") or 1)
    unscored = total_of_metric(rows, "dropped/unscored") + total_of_metric(rows, "dropped/unscored_episodes")

    disk, memory = (newest.get(f"machine/{name}_free_gb", nan) for name in ("disk", "memory"))

    # NaN, of a run without agents, is not above any limit.
    failures = {ending: mean_of_metric(window, f"episode/{metric}") for metric, ending in FAILURES.items()}

    # Each rule: a condition, the finding and the advice. Unknown numbers are NaN, with which every comparison is False.
    rules: list[tuple[Any, str, str]] = [
        (
            spread == 0 and reward == reward,
            f"every sample of the last {len(window)} steps had the reward {reward:.4g}",
            compare,
        ),
        (
            spread != 0 and no_signal > 0.8,
            f"{no_signal:.0%} of the groups had equal rewards and taught nothing",
            harder if is_solved else "Take easier prompts, or more samples",
        ),
        (
            spread != 0 and reward - first_reward > 0.05 and first_accuracy - accuracy > 0.05,
            f"the reward rose from {first_reward:.2f} to {reward:.2f}, and accuracy fell from {first_accuracy:.2f} to "
            f"{accuracy:.2f}",
            "The reward pays wrong answers: read those with the highest rewards, and run `forge doctor reward`",
        ),
        (
            best[0] - last > 0.1,
            f"held-out accuracy fell from {best[0]:.3f} at step {best[1]:.0f} to {last:.3f}",
            "Take a checkpoint from there, a lower learning rate or a KL term (grpo.beta)",
        ),
        (
            collapsed,
            f"entropy fell to {entropy:.2g} nats, {entropy / (before or nan):.0%} of its start, and the reward stopped "
            "rising",
            "Raise grpo.clip_high, add training.entropy_coef, or lower the learning rate",
        ),
        # Engine and trainer compute the same model: a difference beyond rounding makes training off-policy.
        (
            difference > 0.05,
            f"log-probabilities of engine and trainer differ by {difference:.2g} nats on average",
            "`forge mismatch RUN` names the component. Use the same dtype in both, a correction, and "
            "generator.router_replay for mixtures",
        ),
        # A clipped token has no gradient: many mean steps that are too large.
        (
            clipped > 0.3,
            f"{clipped:.0%} of the tokens were clipped",
            "Lower the learning rate, or make fewer updates",
        ),
        # Base models may sample special tokens.
        (
            special > 0.02,
            f"{special:.0%} of the sampled tokens are special ones such as <pad>, which texts and rewards do not show"
            + f", and {cut:.0%} of the completions were cut at max_tokens" * (cut > 0.3),
            "Teach the form of answers first (forge.sft); a higher max_tokens makes more of them",
        ),
        (
            cut > 0.3 and spread != 0 and not special > 0.02,
            f"{cut:.0%} of the completions were cut at max_tokens",
            "Raise it, or shape the length",
        ),
        # Generators that run ahead of the trainer waste what is dropped.
        (
            bound and old > 0.1 * trained,
            f"{old:.0f} groups of the last {len(window)} steps were older than async.max_policy_age = {bound}",
            "Raise it, with a correction, or use fewer generators",
        ),
        (
            unscored,
            f"{unscored:.0f} groups or responses were left out because they had no score",
            "The log has the reasons; each of them once",
        ),
        # A full disk or memory ends the run.
        (
            disk < SCARCE,
            f"{disk:.1f} GB on the disk are left on the controller's machine",
            "Remove old checkpoints, or lower checkpoint.keep and metrics.rollouts_mb",
        ),
        (
            memory < SCARCE,
            f"{memory:.1f} GB of memory are left on the controller's machine",
            "Lower generator.slots, or use fewer processes",
        ),
        (
            any(share > 0.1 for share in failures.values()),
            ", ".join(f"{share:.0%} of the episodes {ending}" for ending, share in failures.items() if share > 0.1),
            "The log has the reasons, and each rollout the end of what its agent printed; limits are in `episode`",
        ),
        (services, f"components were lost and replaced: {services}", "The log says what ended each"),
    ]

    # A run of a shipped recipe that left the band of its seeds: the first departure, which explains those after it.
    reference = find_reference(settings, 0)
    departures = reference.list_departures(rows)[:1] if reference else []
    departure_alerts = [Alert(str(first), f"Usual causes: {CAUSES[first.metric]}") for first in departures]
    return [*departure_alerts, *(Alert(finding, advice) for holds, finding, advice in rules if holds)]


def folder_alerts(folder: Path) -> list[Alert]:
    """Return alerts from the files that `forge mismatch` and the audit of a run have written to its directory."""
    found = []
    # Others may have written these files: their values may have any type or length.
    mismatch, audit = (_read_object(folder / name) for name in (MISMATCH, AUDIT))
    if mismatch.get("is_sound") is False:
        found.append(Alert(str(mismatch.get("sentence"))[:1000], "`forge mismatch` named it from a recorded batch"))
    faults = audit.get("faults")
    shown = faults[:5] if isinstance(faults, list) else ()
    return found + [Alert(str(fault)[:1000], "The audit of the run found it, see `forge audit`") for fault in shown]


def _read_object(path: Path) -> dict[str, Any]:
    # Return the object in a file, {} if there is none. One that is damaged or too large is a fault itself.
    if not is_plain(path):
        return {}
    with path.open("rb") as file:
        return parse_line(file.read(MAX_BYTES)) or {
            "is_sound": False,
            "sentence": f"{path.name} is damaged",
            "faults": [f"{path.name} is damaged"],
        }


def mean_of_metric(rows: Rows, metric: str) -> float:
    """Return the mean of a metric over the rows that have it; NaN if no row has it."""
    values = [row[metric] for row in rows if metric in row]
    return sum(values) / len(values) if values else nan


def total_of_metric(rows: Rows, metric: str) -> float:
    """Return the sum of a metric over the rows; 0 for rows without it."""
    return sum(row.get(metric, 0.0) for row in rows)


def log_alerts(folder: Path, state: str) -> None:
    """Log the three most important alerts of a run that ends."""
    for alert in list_alerts(read_metric_rows(folder), read_settings(folder))[:3]:
        log.info("alert: %s", alert)
