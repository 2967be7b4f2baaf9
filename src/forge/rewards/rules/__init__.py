"""Rewards that are rules: callables `reward(prompt, response, target) -> float`, plain data, safe to pickle.

Any callable of that form is a reward; nothing has to be inherited or registered.
"""

from .math import MathReward, final_answer
from .text import CharacterMatch, ExactMatch, JsonMatch, ThinkingReward, load_reward, overlong_penalty

__all__ = [
    "CharacterMatch",
    "ExactMatch",
    "JsonMatch",
    "MathReward",
    "ThinkingReward",
    "final_answer",
    "load_reward",
    "overlong_penalty",
]
