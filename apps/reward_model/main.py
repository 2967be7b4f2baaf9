"""A reward model from preferences: one number for a whole answer, higher for the one that people preferred.

    python -m apps.reward_model.main --config apps/reward_model/tiny.yaml

Leaves a sequence classifier of one class, as transformers loads it: its logit is the reward.
"""

from forge.recipes.launch import launch
from forge.recipes.reward_model import RewardModelConfig, train

if __name__ == "__main__":
    launch(train, RewardModelConfig)
