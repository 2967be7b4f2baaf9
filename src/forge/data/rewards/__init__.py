"""Rewards that are rules: callables `reward(prompt, response, target) -> float`, plain data, safe to pickle.

Any callable of that form is a reward; nothing has to be inherited or registered.
"""

from forge.data.rewards.match import CharacterMatch, ExactMatch
from forge.data.rewards.math import MathReward, final_answer
from forge.data.rewards.overlong import overlong_penalty
from forge.data.rewards.thinking import ThinkingReward

__all__ = ["CharacterMatch", "ExactMatch", "MathReward", "ThinkingReward", "final_answer", "overlong_penalty"]
