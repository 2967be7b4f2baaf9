"""RL with verifiable rewards; `algorithm` chooses the loss and its advantages. The loops are in `forge.recipes.rl`.

python -m apps.grpo.main --config apps/grpo/tiny.yaml --algorithm dapo --training.steps 50
"""

from forge.recipes.launch import launch
from forge.recipes.rl import train
from forge.recipes.rl_config import RLConfig

if __name__ == "__main__":
    launch(train, RLConfig)
