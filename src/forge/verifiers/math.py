"""The final answer against the target, as text, as numbers, then symbolically."""

from __future__ import annotations

from forge.data.rewards import MathReward

from .rules import TOLERANCE, Rule
from .threads import Turns
from .verifier import Unscored


class MathVerifier(Rule):
    """1 if the final answer of a response equals the target, else 0; see `forge.data.rewards.MathReward`.

    An answer that takes too long to compare is wrong. There is no score without a target, or where the target itself
    takes too long.
    """

    def __init__(self, name: str = "math", *, tolerance: float = TOLERANCE, time_limit: float = 10.0) -> None:
        reward = MathReward(tolerance=tolerance)

        def matches(prompt: str, response: str, target: str | None) -> float:
            if target is None or not target.strip():
                raise Unscored("there is no target to compare with")
            right = reward.is_right(response, target)
            if right is None:
                raise Unscored("the target takes too long to compare")
            return float(right)

        super().__init__(matches, name, time_limit=time_limit, version=f"3 {reward}")
        self._turns = Turns(1)  # one process compares for all, and waiting for it must not count as an answer's time
