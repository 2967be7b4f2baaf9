"""The account of a run's tokens: what agents sampled was trained, or has a named reason why not.

It is summed over the rows of metrics.jsonl, from which a resumed run removes the rows of steps that it computes again:
no token counts twice.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from forge.observability.console import log
from forge_inspect.runs import read_metric_rows

PREFIX = "certificate/"
USES = ("batch", "idle")  # of the tokens that can be trained: in a step, or in a group without an advantage


def token_account(metrics: Iterable[Mapping[str, float]]) -> dict[str, int]:
    """Return the sums of `certificate/NAME` over all steps, by NAME; empty for a run without agents.

    Args:
        metrics: rows of metrics.jsonl.

    >>> token_account([{"certificate/sampled": 5, "reward": 1}, {"certificate/sampled": 3, "certificate/trained": 8}])
    {'sampled': 8, 'trained': 8}
    """
    sums: Counter[str] = Counter()
    for row in metrics:
        for name, value in row.items():
            # Longer names are parts of these sums, such as one policy's.
            if name.startswith(PREFIX) and "/" not in name[len(PREFIX) :]:
                sums[name[len(PREFIX) :]] += round(value)
    return dict(sums) if sums["sampled"] else {}


def account_text(account: Mapping[str, int]) -> str:
    """Return an account that `token_account` returned as a sentence; "" for an empty one.

    >>> account_text({"sampled": 8, "trained": 6, "failed": 2, "batch": 6})
    '8 sampled = 6 trained + 2 failed; of the trained 6 in a step'
    """
    if not account:
        return ""
    sampled = account["sampled"]
    reasons = [name for name in account if name not in ("sampled", "trained", *USES)]
    counts = {name: account.get(name, 0) for name in ["trained", *reasons]}
    text = " + ".join(f"{count:,} {name}" for name, count in counts.items() if count or name == "trained")
    missing = sampled - sum(counts.values())
    equation = f"{sampled:,} sampled = {text}"
    if missing:
        equation = f"{sampled:,} sampled is not {text} ({abs(missing):,} tokens too {'few' if missing > 0 else 'many'})"

    # Groups that were too old, and those that are still in the buffer, have reached no step.
    batch, idle = (account.get(name, 0) for name in USES)
    unused = counts["trained"] - batch - idle
    uses = [f"{batch:,} in a step", *([f"{idle:,} without an advantage"] * bool(idle))]
    uses += [f"{unused:,} in groups that were dropped or wait"] * (unused > 0)
    return f"{equation}; of the trained {', '.join(uses)}"


def account_ended_run(folder: Path, state: str) -> None:
    """Log the token account of a run that ends, if it has agents."""
    if account := token_account(read_metric_rows(folder)):
        log.info("tokens of agents: %s", account_text(account))
