"""The final answer against the target, as text, as numbers, then symbolically."""

from __future__ import annotations

from forge.data.rewards import MathReward

from .rules import TOLERANCE, Rule
from .verifier import Unscored


class MathVerifier(Rule):
    """1 if the final answer of a response equals the target, else 0; see `forge.data.rewards.MathReward`.

    Without a target there is no score, and where an answer takes too long to compare.
    """

    def __init__(self, name: str = "math", *, tolerance: float = TOLERANCE, time_limit: float = 10.0) -> None:
        reward = MathReward(tolerance=tolerance)

        def matches(prompt: str, response: str, target: str | None) -> float:
            if target is None or not target.strip():
                raise Unscored("there is no target to compare with")
            right = reward.is_right(response, target)
            if right is None:
                raise Unscored("its answer takes too long to compare with the target")
            return float(right)

        super().__init__(matches, name, time_limit=time_limit, version=f"2 {reward}")
