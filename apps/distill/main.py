"""On-policy distillation: the student writes, and its teacher says of each token how likely it would have been to it.

    python -m apps.distill.main --config apps/distill/tiny.yaml

Sampling and training take turns. Rewards play no part in training: they say how many held-out answers are right.
"""

from forge.recipes.launch import launch
from forge.recipes.rl import train
from forge.recipes.rl_config import RLConfig

if __name__ == "__main__":
    launch(train, RLConfig)
