"""The quickstart: a small model learns to spell words backwards, by imitation and then by GRPO.

    python -m apps.quickstart --seed 1

The same as `apps.sft.main` and then `apps.grpo.main` with their tiny.yaml, in one program: PyTorch and transformers are
imported once. Options go to both stages.
"""

import sys
from pathlib import Path

from forge.runtime.controller import forked_processes

APPS = Path(__file__).parent


def main(options: list[str]) -> None:
    """Both stages."""
    # Imported here, while the server of forked processes imports PyTorch and transformers for them.
    from forge.config import ConfigError, load
    from forge.recipes import rl, sft
    from forge.recipes.launch import launch
    from forge.recipes.rl_config import RLConfig
    from forge.recipes.sft import SFTConfig

    warm_up = ["--config", str(APPS / "sft/tiny.yaml"), *options]
    try:
        run = load(SFTConfig, warm_up).run
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
    launch(sft.train, SFTConfig, warm_up)
    model = f"{run.root}/{run.name}/model"
    launch(rl.train, RLConfig, ["--config", str(APPS / "grpo/tiny.yaml"), "--model", model, *options])


if __name__ == "__main__":
    with forked_processes():
        main(sys.argv[1:])
