"""A strict comparison of mathematical answers: of their tokens, numbers, units and structures, then symbolically.

`forge.rewards.rules.MathReward` finds it by the entry point `forge.answers`.
"""
