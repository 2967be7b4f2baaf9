"""The two rewards of torchforge with the same scores, for programs whose curves are compared with those of torchforge.

The alias `forge.data.rewards` is `forge.rewards.rules` instead. Those rewards compare final answers as mathematics, and
give nothing for the target elsewhere in the text, as a policy would learn to list numbers.
"""

import re

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
THOUGHT = re.compile(r"<\s*think\s*>(.*?)<\s*/\s*think\s*>", re.IGNORECASE | re.DOTALL)


class MathReward:
    """Returns 1 if the number in the first `<answer>` block is the target, `partial_credit` if the text has it, else 0.

    Args:
        tolerance: absolute difference that the numbers must be below.
        partial_credit: score for a target in the text outside of the blocks.
    """

    def __init__(self, tolerance: float = 1e-6, partial_credit: float = 0.1) -> None:
        self.tolerance, self.partial_credit = tolerance, partial_credit

    def __call__(self, prompt: str, response: str, target: str) -> float:
        expected = self._to_float(target)
        if expected is None:
            return 0.0
        block = ANSWER.search(response)
        number = self._to_float(block.group(1)) if block else None
        if number is not None and abs(number - expected) < self.tolerance:
            return 1.0
        # The target 117.0 is looked for as 117.
        written = str(int(expected)) if expected.is_integer() else str(expected)
        return self.partial_credit if written in ANSWER.sub("", response) else 0.0

    def _to_float(self, text: str) -> float | None:
        """Return the number in a text with spaces, commas or dollar signs; None if it is not a number."""
        try:
            return float(re.sub(r"[$,\s]", "", text))
        except (TypeError, ValueError):
            return None


class ThinkingReward:
    """Returns `full_reward` if a `<think>` block has text, `partial_reward` if there is only a tag, else 0."""

    def __init__(self, partial_reward: float = 0.2, full_reward: float = 1.0) -> None:
        self.partial_reward, self.full_reward = partial_reward, full_reward

    def __call__(self, prompt: str, response: str | None, target: str | None = None) -> float:
        response = response or ""
        if any(thought.strip() for thought in THOUGHT.findall(response)):
            return self.full_reward
        return self.partial_reward if re.search(r"<\s*/?\s*think\s*>", response, re.IGNORECASE) else 0.0
