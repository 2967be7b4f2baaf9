"""What would make a component fit its GPU: a short list of settings, each planned, the cheapest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from transformers import PreTrainedConfig

from forge.engines.cache import BLOCK
from forge.engines.interface import check_length
from forge.recipes.schema import RecipeConfig, TrainingRecipe

from .devices import Machines
from .generation import engine_memory
from .trainers import kind_of, trainer_plan

FACTORS = (2, 4, 8)  # times as many ranks; degrees, which stay within a host
SHORTEST = 512  # tokens of a pack: less would hold few whole answers
Settings = dict[str, str | int]  # by dotted keys
Change = Callable[[Settings], TrainingRecipe]  # the configuration with other settings; ValueError: they do not fit it


def trainer_remedy(
    cfg: TrainingRecipe, config: PreTrainedConfig, folder: Path, name: str, machines: Machines, change: Change
) -> str:
    """The first change with which a trainer, critic or reference model fits, in one sentence."""
    for settings in _candidates(cfg, name):
        try:
            plan = trainer_plan(change(settings), config, folder, name, machines)
        except ValueError:  # the model cannot be divided so
            continue
        if plan.fits:
            return f"the {name} fits with {_words(settings)}: {plan.total / 1e9:.1f} GB"
    return (
        f"the {name} fits with none of: recomputed activations, more GPUs, divided layers, a shorter training.seq_len"
    )


def _candidates(cfg: TrainingRecipe, name: str) -> Iterator[Settings]:
    first: Settings = {}
    if not cfg.training.gradient_checkpointing and kind_of(name) != "ref_model":
        # The cheapest remedy, and a part of the others where it is not enough.
        first = {"training.gradient_checkpointing": "true"}
        yield first
    now = cfg.placement(name)["procs"]
    procs = f"{_section(name)}.procs"
    yield from (first | {procs: now * factor} for factor in FACTORS)
    # More ranks divide weights and state alone; these divide the activations of a sequence as well.
    for count in (now, *(now * factor for factor in FACTORS)):
        ranks: Settings = {procs: count} if count != now else {}
        for dimension in ("context", "tensor"):
            degrees = [degree for degree in FACTORS if count % degree == 0]
            yield from (first | ranks | {f"parallelism.{dimension}_parallel_degree": degree} for degree in degrees)
    # Shorter packs come last, as they bound answers.
    lengths = [cfg.training.seq_len >> halvings for halvings in range(1, 12)]
    yield from (first | {"training.seq_len": length} for length in lengths if length >= SHORTEST)


def engine_remedy(cfg: RecipeConfig, config: PreTrainedConfig, elements: int, machines: Machines, name: str) -> str:
    """The first change with which two sequences of full length fit a generator, in one sentence."""
    settings = cfg.generator
    procs = cfg.placement(name)["procs"]
    length = check_length(config, settings.max_seq_len)
    # More GPUs keep all slots, and fewer slots keep the length of answers: shorter ones come last.
    changes: list[Settings] = []
    if settings.engine == "vllm":
        counts = [procs * factor for factor in FACTORS]
        changes += [{"procs": count} for count in counts if config.num_key_value_heads % count == 0]
    else:  # its logits take memory for each slot
        changes += [{"slots": slots} for n in range(1, 12) if (slots := settings.slots >> n) >= 2]
    changes += [{"max_seq_len": shorter} for n in range(1, 12) if (shorter := length >> n) >= BLOCK]
    for change in changes:
        processes = int(change.get("procs", procs))
        changed = settings.model_copy(update={key: value for key, value in change.items() if key != "procs"})
        memory = engine_memory(config, elements, changed, processes, machines.device)
        if memory.sequences >= 2:
            words = _words(
                {f"{_section(name) if key == 'procs' else 'generator'}.{key}": change[key] for key in change}
            )
            return f"the {name} fits with {words}: {memory.sequences} sequences of full length at once"
    tensor = "" if settings.engine == "vllm" else "; generator.engine vllm divides the weights over several GPUs"
    return f"the {name} fits with none of: fewer generator.slots, a shorter generator.max_seq_len{tensor}"


def _section(service: str) -> str:
    """The section that places a service."""
    return service if service.startswith("models.") else f"services.{service}"


def _words(settings: Settings) -> str:
    return " and ".join(f"{key} {value}" for key, value in settings.items())
