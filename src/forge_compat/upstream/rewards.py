"""The two rewards of torchforge as it scores them, for programs that compare with its curves.

`forge.data.rewards` gives `forge.rewards.rules`: they compare final answers as mathematics, and pay nothing
for a number anywhere in the text, by which a policy learns to list numbers.
"""

import re

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
THOUGHT = re.compile(r"<\s*think\s*>(.*?)<\s*/\s*think\s*>", re.IGNORECASE | re.DOTALL)
THOUGHT_TAG = re.compile(r"<\s*/?\s*think\s*>", re.IGNORECASE)
DECORATION = re.compile(r"[$,\s]")


class MathReward:
    """1 if the number in the first `<answer>` block is the target, else `partial_credit` if the target is in the text.

    Args:
        tolerance: how far the numbers may lie apart.
        partial_credit: for a target that stands outside of the answer.
    """

    def __init__(self, tolerance: float = 1e-6, partial_credit: float = 0.1) -> None:
        self.tolerance = tolerance
        self.partial_credit = partial_credit

    def __call__(self, prompt: str, response: str, target: str) -> float:
        expected = self._to_float(target)
        if expected is None:
            return 0.0
        block = ANSWER.search(response)
        number = self._to_float(block.group(1)) if block else None
        if number is not None and abs(number - expected) < self.tolerance:
            return 1.0
        # 117 and 117.0 are written the same.
        written = str(int(expected)) if expected.is_integer() else str(expected)
        return self.partial_credit if written in ANSWER.sub("", response) else 0.0

    def _to_float(self, text: str) -> float | None:
        """Return a number without blanks, commas and dollars; None if it is none."""
        try:
            return float(DECORATION.sub("", text))
        except (TypeError, ValueError):
            return None


class ThinkingReward:
    """`full_reward` if a `<think>` block has text, else `partial_reward` if there is a tag, else 0."""

    def __init__(self, partial_reward: float = 0.2, full_reward: float = 1.0) -> None:
        self.partial_reward = partial_reward
        self.full_reward = full_reward

    def __call__(self, prompt: str, response: str | None, target: str | None = None) -> float:
        response = response or ""
        if any(thought.strip() for thought in THOUGHT.findall(response)):
            return self.full_reward
        return self.partial_reward if THOUGHT_TAG.search(response) else 0.0
