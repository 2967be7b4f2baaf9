"""The recipes as commands: `forge train CONFIG` and others."""

import argparse
import importlib
from pathlib import Path

from .subparsers import Subparsers

# {command: (module of its configuration, class of the configuration, description)}
RECIPES = {
    "train": ("forge.recipes.rl_config", "RLConfig", "reinforcement learning with rewards or environments"),
    "sft": ("forge.recipes.sft", "SFTConfig", "supervised fine-tuning"),
    "dpo": ("forge.recipes.dpo", "DPOConfig", "direct preference optimisation"),
    "reward-model": ("forge.recipes.reward_model", "RewardModelConfig", "a reward model from preferences"),
}
LOOPS = {"train": "forge.recipes.rl"}  # {command: module of its recipe}, if that is not the configuration's module

# Configurations of the recipes that this library installs.
EXAMPLES = {
    "train": "apps/grpo/gsm8k.yaml",
    "sft": "apps/sft/tiny.yaml",
    "dpo": "apps/dpo/tiny.yaml",
    "reward-model": "apps/reward_model/tiny.yaml",
}


def add_to(commands: Subparsers) -> None:
    """Add a command for each recipe to the parser."""
    for name, (_, _, text) in RECIPES.items():
        parser = commands.add_parser(
            name, help=text, description=text, epilog=f"example: forge {name} {EXAMPLES[name]} --training.steps 50"
        )
        parser.add_argument("config", help="YAML file, see docs/configuration.md; apps/... names an installed recipe")
        parser.add_argument("overrides", nargs=argparse.REMAINDER, help="--section.key VALUE, --resume RUN|auto")
        parser.set_defaults(run=run, recipe=name)


def run(args: argparse.Namespace) -> None:
    """Run the recipe of the command `args.recipe`; invalid input ends the program with one line."""
    from ..config.arguments import Arguments, find_bundled, read_file
    from ..config.sections import ConfigError
    from ..recipes.signals import end_at_signals

    end_at_signals()
    words = ["--config", args.config, *args.overrides]
    try:
        Arguments.parse(words)
        read_file(find_bundled(Path(args.config)))  # checked before imports that take seconds, and the first process
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None

    from ..runtime.controller import forked_processes

    module, config, _ = RECIPES[args.recipe]
    with forked_processes():  # the server imports its libraries while this process imports the recipe
        from ..recipes.launch import launch

        loop = importlib.import_module(LOOPS.get(args.recipe, module))
        launch(loop.train, getattr(importlib.import_module(module), config), words)
