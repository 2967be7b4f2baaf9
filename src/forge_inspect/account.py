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
USES = ("batch", "idle")  # what became of the trainable tokens: in a step, or in a group without an advantage


def token_account(metrics: Iterable[Mapping[str, float]]) -> dict[str, int]:
    """Return the sums of `certificate/NAME` over all steps, by name; empty for a run without agents."""
    sums: Counter[str] = Counter()
    for row in metrics:
        for name, value in row.items():
            # Longer names are parts of these sums, such as one policy's.
            if name.startswith(PREFIX) and "/" not in name[len(PREFIX) :]:
                sums[name[len(PREFIX) :]] += round(value)
    return dict(sums) if sums["sampled"] else {}


def account_text(account: Mapping[str, int]) -> str:
    """Return an account of `token_account` as a sentence; "" for an empty one."""
    if not account:
        return ""
    parts = ["trained", *(name for name in account if name not in ("sampled", "trained", *USES))]
    counts = {name: account.get(name, 0) for name in parts}
    text = " + ".join(f"{count:,} {name}" for name, count in counts.items() if count or name == "trained")
    difference = account["sampled"] - sum(counts.values())
    sign = "=" if not difference else "is not"
    fault = f" ({abs(difference):,} tokens too {'few' if difference > 0 else 'many'})" if difference else ""
    batch, idle = (account.get(name, 0) for name in USES)
    # Groups that were too old, and those that are still in the buffer, have reached no step.
    rest = counts["trained"] - batch - idle
    uses = [f"{batch:,} in a step", *([f"{idle:,} without an advantage"] * bool(idle))]
    uses += [f"{rest:,} in groups that were dropped or wait"] * (rest > 0)
    return f"{account['sampled']:,} sampled {sign} {text}{fault}; of the trained {', '.join(uses)}"


def account_ended_run(folder: Path, state: str) -> None:
    """Log the account of a run that ends."""
    if account := token_account(read_metric_rows(folder)):
        log.info("tokens of agents: %s", account_text(account))
