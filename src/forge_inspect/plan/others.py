"""The components beside the policy's own: critics, references, further models, reward models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
)

from forge.models.architecture import longest
from forge.recipes.schema import RecipeConfig, TrainingRecipe
from forge.runtime.controller import Options
from forge_verifiers.config import ModelSettings, ProcessRewardModelSettings, models_of

from .devices import Machines
from .meter import metered
from .passes import META
from .trainers import ComponentPlan, kind_of

PLANNED = ("trainer", "critic", "ref_model", "generator")
REWARD_REMEDY = (
    "the reward fits with a lower batch_tokens of its models, dtype bfloat16, or fewer models: each of its processes "
    "has all of them"
)


def services_of(cfg: TrainingRecipe) -> list[str]:
    """The services that hold a model, but for the run's own trainer and generator."""
    left_out = {"trainer", "generator", *cfg.idle}
    names = (setting.removeprefix("services.") for setting in cfg.placements())
    return [name for name in names if kind_of(name) in PLANNED and name not in left_out]


def model_of(
    cfg: TrainingRecipe, service: str, own: tuple[PreTrainedConfig, Path], find: Callable[[str], Path]
) -> tuple[PreTrainedConfig, Path]:
    """The model that a service holds: its configuration and folder; the run's own where nothing names another.

    Raises:
        ValueError: a model whose configuration cannot be read.
    """
    names = cfg.others()
    kind = kind_of(service)
    # A critic or reference that is named is that of all policies; else each begins as its policy.
    keys = {"critic": ["critic.model"], "ref_model": ["grpo.reference", "distill.teacher"]}.get(kind, [])
    if service.startswith("models."):
        keys = [*keys, f"models.{service.split('.')[1]}.model"]
    name = next((names[key] for key in keys if key in names), None)
    if name is None:
        return own
    folder = find(name)
    return AutoConfig.from_pretrained(folder, trust_remote_code=False), folder


def count_elements(folder: Path) -> int:
    """Parameters of a causal language model, from its config.json."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # Without memory: a model of 32B has its number of parameters in .2 s.
    with META:
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return sum(weight.numel() for weight in model.parameters())


def reward_plan(
    cfg: TrainingRecipe, config: PreTrainedConfig, machines: Machines, find: Callable[[str], Path]
) -> ComponentPlan | None:
    """The memory of the reward's models, of which each of its processes has all; None where it has none.

    Args:
        config: of the policy, whose sequences they read.

    Raises:
        FileNotFoundError: a verifier's files, which name its models, are not there yet.
    """
    if not isinstance(cfg, RecipeConfig):
        return None
    verifiers = cfg.reward.verifiers
    models = [*(verifiers.planned_models() if verifiers is not None else ()), *models_of(cfg.scorers)]
    if not models:
        return None
    options = cfg.service("reward") or Options()
    memory = [scoring_memory(settings, find(settings.path), cfg.reach(config)) for settings in models]
    with_gpus = options.with_gpus and any(settings.device != "cpu" for settings in models)
    return ComponentPlan(
        "reward",
        options.procs * options.num_replicas,
        with_gpus,
        # They may score at once, each in a thread.
        {"weights": sum(weights for weights, _ in memory), "activations": sum(passes for _, passes in memory)},
        machines.device.memory,
    )


def scoring_memory(settings: ModelSettings, folder: Path, length: int) -> tuple[int, int]:
    """The bytes of a reward model's weights, and what its forward pass of a full batch holds beside them.

    Args:
        length: of the longest sequence that it is given, in tokens; shorter ones fill the batch as well.
    """
    loader: Any = AutoModelForSequenceClassification
    if isinstance(settings, ProcessRewardModelSettings):
        loader = AutoModelForTokenClassification if settings.good is None else AutoModelForCausalLM
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    text_config = config.get_text_config()
    text_config.pad_token_id = text_config.pad_token_id or 0  # a run takes the tokenizer's
    with META:
        model = loader.from_config(config, dtype=getattr(torch, settings.dtype), trust_remote_code=False)
    model.eval()
    # Long rows: attention's mask grows with the square of the width, all else with the tokens of the batch.
    width = min(length, longest(config), settings.max_tokens or length, settings.batch_tokens)
    rows = max(1, settings.batch_tokens // width)
    ids = torch.zeros((rows, width), dtype=torch.long, device=META)
    weights = dict(model.named_parameters())
    with metered(weights) as meter, torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    held = sum(weight.nbytes for weight in weights.values())
    return held, max(most for _, most in meter.peaks.values())
