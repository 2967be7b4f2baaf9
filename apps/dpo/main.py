"""Direct preference optimisation: of two answers the preferred one becomes more likely than it was, against the other.

    python -m apps.dpo.main --config apps/dpo/tiny.yaml

The reference is the model that training starts from. No reward model and no sampling: pairs in, a policy out.
"""

from forge.recipes.dpo import DPOConfig, train
from forge.recipes.launch import launch

if __name__ == "__main__":
    launch(train, DPOConfig)
