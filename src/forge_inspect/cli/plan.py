"""`forge plan CONFIG`: the memory of a run, before it starts and without a GPU."""

import argparse
import importlib
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from forge.cli.recipes import RECIPES
from forge.cli.subparsers import Subparsers, add_command

# The recipe of a configuration, by a section that no other recipe has.
SECTIONS = {"grpo": "train", "algorithm": "train", "dpo": "dpo", "reward_model": "reward-model"}


def add_to(commands: Subparsers) -> None:
    """Add the command `forge plan` to the parser."""
    add_command(
        commands,
        "plan",
        "what a configuration needs: memory of each process; without a GPU and without weights",
        "apps/grpo/qwen3_1_7b.yaml --gpus 2xH100",
        run,
        [
            ("config", {"help": "YAML file of a recipe; apps/... names an installed recipe"}),
            ("overrides", {"nargs": argparse.REMAINDER, "help": "--gpus 8xH100 (64xH200, cpu); --section.key VALUE"}),
        ],
    )


def run(args: argparse.Namespace) -> None:
    """Print the plan of a configuration; exit code 1 if a component does not fit."""
    from ..plan.plan import plan_lines

    # --gpus is an option of this command, all other arguments are settings of the recipe.
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    options.add_argument("--gpus")
    try:
        known, overrides = options.parse_known_args(args.overrides)
    except argparse.ArgumentError as error:
        raise ValueError(error) from None
    _, plan = plan_file(args.config, overrides, known.gpus)
    print("\n".join(plan_lines(plan)))
    if not plan.fits:
        raise SystemExit(1)


def plan_file(config: str, overrides: list[str], gpus: str | None) -> tuple[Any, Any]:
    """Return the configuration of a file, and its `forge_inspect.plan.plan.Plan`.

    Args:
        config: path of a YAML file, or apps/... of an installed recipe.
        overrides: settings such as "--training.seq_len", "4096".
        gpus: such as "8xH100"; None for "8xH100", or "cpu" if the configuration uses no GPU.

    Raises:
        ConfigError: a setting does not exist, or is invalid.
        ValueError: an unknown device or model, or degrees that do not fit the model.
    """
    from forge.config.arguments import find_bundled, load, read_file
    from forge.system.extras import run_elsewhere

    sections = read_file(find_bundled(Path(config)))
    if "collect" in sections:
        raise ValueError(
            f"{config} collects answers without training, so there is no memory to plan: give a training configuration"
        )
    module, kind, _ = RECIPES[next((name for section, name in SECTIONS.items() if section in sections), "sft")]
    models = (sections.get("models") or {}).values()
    if any(isinstance(model, dict) and (model.get("trains") or model.get("seat_of")) for model in models):
        module, kind = "forge_agents.several", "SeveralPoliciesConfig"

    config_type = getattr(importlib.import_module(module), kind)

    def change_settings(settings: dict[str, Any]) -> Any:
        changes = [argument for key, value in settings.items() for argument in (f"--{key}", str(value))]
        # Checked like the configuration of a run, except for packages and files that this machine need not have.
        with run_elsewhere():
            return load(config_type, ["--config", config, *overrides, *changes])

    cfg = change_settings({})
    from forge.models.find import build_small_model
    from forge.runtime.inventory import memory_limit

    from ..plan.devices import Machines, parse_machines, shape_folder
    from ..plan.plan import make_plan

    cpu = Machines("CPU", memory_limit(), 1, "cpu")
    uses_gpus = any(cfg.services[name].with_gpus for name in cfg.configured())
    machines = parse_machines(gpus or ("8xH100" if uses_gpus else "cpu"), cpu)

    with tempfile.TemporaryDirectory() as scratch:
        find = partial(shape_folder, scratch=Path(scratch))
        if cfg.model is None:
            folder = Path(build_small_model(Path(scratch) / "model", seed=0, **cfg.from_scratch))
        else:
            folder = find(cfg.model)
        return cfg, make_plan(cfg, folder, cfg.model or "a model from scratch", machines, find, change_settings)
