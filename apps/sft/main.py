"""Supervised fine-tuning: cross-entropy on conversations, prompts with answers or plain text, of one or more datasets.

    python -m apps.sft.main --config apps/sft/tiny.yaml

Ends after `training.steps`, or as soon as held-out accuracy reaches `eval.stop_at`. With `from_scratch` it starts from
a small model that is made from the seed, and nothing is downloaded.
"""

from forge.recipes.launch import launch
from forge.recipes.sft import SFTConfig, train

if __name__ == "__main__":
    launch(train, SFTConfig)
