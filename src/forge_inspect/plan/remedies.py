"""What would make a component fit its GPU: each candidate is planned, the cheapest first."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from forge.config.plugin import resolve
from forge.engines.cache import BLOCK
from forge.engines.interface import check_length
from forge.models.architecture import longest, sparse_layers
from forge.recipes.rl_config import RLConfig
from forge.recipes.schema import RecipeConfig, TrainingRecipe
from forge.runtime.controller import Options

from .devices import Machines
from .generation import engine_memory
from .trainers import ComponentPlan, kind_of, trainer_plan

GROWTH = 8  # times as many ranks, at most
DEGREES = (2, 4, 8)  # of tensor and context parallelism, which stay within a host
SHORTEST = 512  # tokens of a pack: less would hold few whole answers
Candidate = tuple[str, TrainingRecipe]


def trainer_remedy(
    cfg: TrainingRecipe,
    config: PreTrainedConfig,
    folder: Path,
    name: str,
    machines: Machines,
    *,
    most_ranks: float,
    until: float,
) -> str:
    """The first change with which a trainer, critic or reference model fits, in one sentence.

    Args:
        most_ranks: that there are GPUs for.
        until: when to stop, by `time.process_time`.
    """
    for words, candidate in _candidates(cfg, name, most_ranks, _divides_experts(cfg, config)):
        if time.process_time() > until:
            return f"the {name} fits with none of the changes that were tried: forge plan tries more"
        plan = _try(candidate, config, folder, name, machines)
        if plan is not None and plan.fits:
            return f"the {name} fits with {words}: {plan.total / 1e9:.1f} GB"
    return (
        f"the {name} fits with none of: recomputed activations, more GPUs, divided layers, a shorter training.seq_len"
    )


def _candidates(cfg: TrainingRecipe, name: str, most_ranks: float, divides_experts: bool) -> Iterator[Candidate]:
    prefix = ""
    kind = kind_of(name)
    setting = setting_of(name)
    if not cfg.training.gradient_checkpointing and kind != "ref_model":
        # The cheapest remedy, and a part of the others where it is not enough.
        cfg = _changed(cfg, "training", gradient_checkpointing=True)
        yield "training.gradient_checkpointing", cfg
        prefix = "training.gradient_checkpointing and "
    # Powers of two, as degrees and hosts are.
    now = cfg.placement(name)["procs"]
    ranks = [now * factor for factor in (1, 2, 4, GROWTH) if now * factor <= most_ranks]
    # Shards stay within a host unless a degree says otherwise.
    layout = cfg.layout(name).over(now)
    shards = layout.data_parallel_shard_degree * (layout.data_parallel_replicate_degree or 1)
    if kind == "trainer" and shards > layout.data_parallel_shard_degree:
        words = f"parallelism.data_parallel_shard_degree {shards}"
        yield prefix + words, _changed(cfg, "parallelism", data_parallel_shard_degree=shards)
    for count in ranks[1:]:
        yield f"{prefix}{setting}.procs {count}", _with_ranks(cfg, name, count)
    # More ranks divide weights and state alone; these divide the activations of a sequence as well.
    for count in ranks:
        words = f"{setting}.procs {count} and " if count != now else ""
        for dimension in ("context", "tensor", "expert"):
            for degree in DEGREES:
                if count % degree or degree <= getattr(cfg.parallelism, f"{dimension}_parallel_degree"):
                    continue
                divided = _changed(
                    _with_ranks(cfg, name, count), "parallelism", **{f"{dimension}_parallel_degree": degree}
                )
                changes = f"{prefix}{words}parallelism.{dimension}_parallel_degree {degree}"
                if dimension != "expert":
                    yield changes, divided
                elif divides_experts and kind == "trainer":
                    yield f"{changes} and trainer.backend titan", _changed(divided, "trainer", backend="titan")
    # Shorter packs come last, as they bound answers.
    seq_len = cfg.training.seq_len // 2
    while seq_len >= SHORTEST:
        yield f"{prefix}training.seq_len {seq_len}", _changed(cfg, "training", seq_len=seq_len)
        seq_len //= 2


def longer_packs(cfg: TrainingRecipe, config: PreTrainedConfig, folder: Path, machines: Machines) -> str | None:
    """The longest training.seq_len with which the trainer fits, by doubling it as far as the model's positions."""
    fitting = None
    seq_len = 2 * cfg.training.seq_len
    while seq_len <= longest(config):
        plan = _try(_changed(cfg, "training", seq_len=seq_len), config, folder, "trainer", machines)
        if plan is None or not plan.fits:
            break
        fitting = f"training.seq_len up to {seq_len} fits: {plan.total / 1e9:.1f} GB"
        seq_len *= 2
    return fitting


def engine_remedy(
    cfg: RecipeConfig, config: PreTrainedConfig, elements: int, machines: Machines, name: str = "generator"
) -> str:
    """The first change with which two sequences of full length fit a generator, in one sentence."""
    settings = cfg.generator
    procs = cfg.placement(name)["procs"]
    candidates: list[tuple[str, dict[str, Any], int]] = []
    # More GPUs keep all slots, and fewer slots keep the length of answers: shorter ones come last.
    if settings.engine == "vllm":
        heads = config.num_key_value_heads
        degrees = [procs * factor for factor in DEGREES if heads % (procs * factor) == 0]
        candidates += [(f"{setting_of(name)}.procs {degree}", {}, degree) for degree in degrees]
    # Of the embedded engine: its logits take memory for each slot.
    slots = settings.slots // 2 if settings.engine == "embedded" else 0
    while slots >= 2:
        candidates.append((f"generator.slots {slots}", {"slots": slots}, procs))
        slots //= 2
    length = check_length(config, settings.max_seq_len) // 2
    while length >= BLOCK:
        candidates.append((f"generator.max_seq_len {length}", {"max_seq_len": length}, procs))
        length //= 2
    for words, changes, degree in candidates:
        memory = engine_memory(config, elements, settings.model_copy(update=changes), degree, machines.device)
        if memory.sequences >= 2:
            return f"the {name} fits with {words}: {memory.sequences} sequences of full length at once"
    tensor = "" if settings.engine == "vllm" else "; generator.engine vllm divides the weights over several GPUs"
    return f"the {name} fits with none of: fewer generator.slots, a shorter generator.max_seq_len{tensor}"


def _try(
    cfg: TrainingRecipe, config: PreTrainedConfig, folder: Path, name: str, machines: Machines
) -> ComponentPlan | None:
    """The plan of a candidate; None where the model cannot be divided so."""
    try:
        return trainer_plan(cfg, config, folder, name, machines).plan
    except ValueError:
        return None


def _divides_experts(cfg: TrainingRecipe, config: PreTrainedConfig) -> bool:
    """Whether TorchTitan can train this model with these settings, and it has experts to divide."""
    if not sparse_layers(config) or hasattr(cfg, "reward_model"):
        return False
    if cfg.lora is not None or cfg.training.weights_dtype != "float32":
        return False
    try:
        resolve("forge_titan.setup:check_model", "trainer.backend")(config)
    except ValueError:
        return False
    return True


def setting_of(service: str) -> str:
    """The section that places a service."""
    return service if service.startswith("models.") else f"services.{service}"


def _with_ranks(cfg: TrainingRecipe, name: str, ranks: int) -> TrainingRecipe:
    options = Options(**cfg.placement(name))
    changes = {"procs": ranks}
    if options.host_count is not None:
        changes["hosts"] = options.host_count * ranks // options.procs
    changed = options.model_copy(update=changes)
    if not name.startswith("models."):
        return _changed(cfg, "services", **{name: changed})
    assert isinstance(cfg, RLConfig)
    _, model, part = name.split(".")
    further = cfg.models[model].model_copy(update={part: changed})
    return cfg.model_copy(update={"models": {**cfg.models, model: further}})


def _changed(cfg: TrainingRecipe, section: str, **values: Any) -> TrainingRecipe:
    return cfg.model_copy(update={section: cfg[section].model_copy(update=values)})
