"""What a fit found, in plain values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass
class FitReport:
    """Attributes:
    method: the aggregator's name.
    problems, responses: how many it was fitted on.
    class_balance: the share of right responses, given or estimated; None where the method needs none.
    coverage: the share of responses that at least one verifier scored.
    verifiers: for each one its coverage, weight (0 if dropped) and what else the method estimates: `tpr`, `tnr` (shares
        of right responses accepted, of wrong ones rejected) or `separation` (mean of the right less mean of the
        wrong, in standard deviations of the verifier).
    dropped: verifiers left out, and why.
    residual_correlation: root mean square of the correlations between verifiers within a class, less what chance
        makes; near 0 where they are conditionally independent. None where it was not computed.
    correlation: those correlations, a row for each of `correlated`.
    details: what only this method has to say, such as the penalty it chose.
    warnings, alarms: in words. Alarms name verifiers that are being gamed.
    """

    method: str
    problems: int = 0
    responses: int = 0
    class_balance: float | None = None
    coverage: float = math.nan
    verifiers: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    dropped: dict[str, str] = dataclasses.field(default_factory=dict)
    residual_correlation: float | None = None
    correlated: list[str] = dataclasses.field(default_factory=list)
    correlation: list[list[float]] = dataclasses.field(default_factory=list)
    details: dict[str, Any] = dataclasses.field(default_factory=dict)
    warnings: list[str] = dataclasses.field(default_factory=list)
    alarms: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        """For people: what to beware of, then a line for each verifier."""
        lines = [f"{self.method}, {self.responses} responses to {self.problems} problems"]
        if self.class_balance is not None:
            lines[0] += f", {self.class_balance:.3f} of them right"
        if self.residual_correlation is not None:
            lines[0] += f", residual correlation {self.residual_correlation:.3f}"
        lines += [f"alarm: {text}" for text in self.alarms] + [f"warning: {text}" for text in self.warnings]
        lines += [f"left out: {name}, {why}" for name, why in self.dropped.items()]
        for name, found in self.verifiers.items():
            if name not in self.dropped:
                lines.append(f"{name}: {', '.join(f'{what} {value:.3f}' for what, value in found.items())}")
        return "\n".join(lines)

    def grow(self, verifiers: Sequence[str], problems: int, known: np.ndarray) -> None:
        """Count further problems, whose [responses, verifiers] scores are known or not."""
        self.problems += problems
        self.responses += len(known)
        share = len(known) / self.responses
        self.coverage += share * (float(known.any(1).mean()) - self.coverage)
        for name, some in zip(verifiers, known.mean(0), strict=True):
            found = self.verifiers[name]
            found["coverage"] += share * (float(some) - found["coverage"])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, None in place of NaN."""
        return _plain(dataclasses.asdict(self))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):  # np.float64 too
        return float(value) if math.isfinite(value) else None
    return value.item() if hasattr(value, "item") else value
