"""The memory of each component of a run: trainers, critics and references, engines, and the reward's models."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from forge.engines.cache import BLOCK, WIDTH, round_up, state_bytes, token_bytes
from forge.engines.engine import MARGIN as ENGINE_MARGIN
from forge.engines.interface import check_length
from forge.models.architecture import max_length
from forge.models.tokenizer import model_config
from forge.recipes.schema import RecipeConfig, TrainingRecipe
from forge.runtime.controller import Options
from forge.training.settings import Head, OptimizerSettings, PassSettings
from forge.types import Batch
from forge_verifiers.config import ModelSettings, ProcessRewardModelSettings, models_of

from .devices import CONTEXT, Machines
from .meter import measure_block
from .passes import META, run_passes, trainer_memory

MARGIN = 0.06  # share of a GPU's memory that stays free, for fragments and the error of the plan


@dataclass(frozen=True)
class ComponentPlan:
    """The memory of each process of a component.

    Args:
        name: of the component's service, such as "trainer".
        processes: number of processes, of all replicas.
        parts: bytes by what they hold, such as "weights".
        capacity: bytes of the device.
        moment: of a trainer: when it needs the most memory.
        sequences: of an engine: number of sequences of full length that it runs at once in all memory that there is.
        limits: of an engine: a sentence on this number.
        elements: number of parameters of the model.
    """

    name: str
    processes: int
    with_gpus: bool
    parts: dict[str, int]
    capacity: float
    moment: str = ""
    sequences: int | None = None
    limits: str = ""
    elements: int = 0

    @property
    def total(self) -> float:
        """Return the bytes that a process needs, on a GPU with its driver's bytes."""
        return sum(self.parts.values()) + (CONTEXT if self.with_gpus else 0)

    @property
    def fits(self) -> bool:
        """Return whether a process fits its GPU, with a margin; an engine does with two sequences of full length."""
        if self.sequences is not None:
            return self.sequences >= 2
        return not self.with_gpus or self.total <= self.bound

    @property
    def bound(self) -> float:
        """Return the bytes of the device that a process may take."""
        return self.capacity * (1 - MARGIN)


def kind_of(service: str) -> str:
    """Return the kind of a service, which is the last part of its name.

    >>> kind_of("models.rival.trainer")
    'trainer'
    """
    return service.rpartition(".")[2]


def trainer_plan(cfg: TrainingRecipe, folder: Path, name: str, machines: Machines) -> ComponentPlan:
    """Return the plan of a component that trains a model or scores with it.

    Args:
        folder: with the model's config.json.
        name: of its service: trainer, critic, ref_model, or one of an additional policy, `models.rival.trainer`.

    Raises:
        ValueError: a model, or degrees of parallelism, that the trainer rejects.
    """
    options, kind = Options(**cfg.placement(name)), kind_of(name)
    layout = cfg.layout(name).over(options.procs)
    settings = PassSettings(**cfg.training.only(PassSettings))
    learns = kind != "ref_model"
    device_type = machines.type if options.with_gpus else "cpu"

    # A single process needs FSDP for bfloat16 on a GPU and for offloading, see `forge.training.distributed.join_ranks`.
    has_mesh = options.procs > 1 or (device_type != "cpu" and (settings.dtype == "bfloat16" or settings.cpu_offload))
    head: Head = "reward" if hasattr(cfg, "reward_model") else "policy"
    if kind == "critic":
        head = "value"

    # A micro-batch is full, and an update has several of them if one pack per rank does not hold the batch.
    data_ranks = (layout.data_parallel_replicate_degree or 1) * layout.data_parallel_shard_degree
    seq_len = cfg.training.seq_len
    length = min(cfg.reach(model_config(folder)), seq_len)
    sampling = getattr(cfg, "grpo", None)
    samples = cfg.training.batch_size * (sampling.n_samples if sampling is not None else 1)
    passes = run_passes(
        folder,
        full_batch(seq_len, length, data_ranks),
        weighted_scores if head == "policy" else weighted_values,
        settings,
        head=head,
        lora=cfg.lora if kind == "trainer" else None,
        parallelism=layout,
        world_size=options.procs,
        device_type=device_type,
        learns=learns,
        backend=cfg.trainer.backend if kind == "trainer" else "fsdp",
    )

    memory = trainer_memory(
        passes,
        settings,
        OptimizerSettings(**cfg.training.only(OptimizerSettings)),
        shards=layout.data_parallel_shard_degree * layout.context_parallel_degree if has_mesh else None,
        micro_batches=2 if samples * length > seq_len * data_ranks else 1,
        gloo=device_type == "cpu",
        learns=learns,
    )
    parts = {part: size for part, size in asdict(memory).items() if part != "moment"}
    if layout.stages > 1:
        # Stages have a buffer for the states of every micro-batch of an update and for their gradients.
        tokens = samples * length // (options.procs // layout.pipeline_parallel_degree)
        parts["activations"] += 2 * tokens * model_config(folder).hidden_size * passes.itemsize
    if cfg.training.cpu_offload and learns:
        # FSDP2 keeps these in host memory, where the optimiser computes too.
        parts |= {"weights": 0, "gradients": 0, "optimizer": 0}

    return ComponentPlan(
        name,
        options.procs * options.num_replicas,
        options.with_gpus,
        {part: size for part, size in parts.items() if size},
        machines.memory,
        memory.moment,
        elements=count_elements(folder)
        if layout.stages > 1 or (cfg.lora is not None and cfg.lora.quantize)
        else passes.elements * layout.tensor_parallel_degree,
    )


def full_batch(seq_len: int, length: int, ranks: int) -> Batch:
    """Return a batch with one pack of about `seq_len` tokens for each rank.

    Args:
        length: tokens of each sequence; all but its first one are trained.
        ranks: number of data-parallel ranks.
    """
    count = max(1, seq_len // length) * ranks
    tokens = count * length
    mask = np.ones(tokens, dtype=bool)
    mask[::length] = False
    numbers = np.zeros(tokens, dtype=np.float32)

    return Batch(
        # The first tokens differ, so that packing finds no shared prefix.
        tokens=np.arange(tokens) % 97 + np.repeat(np.arange(count), length) % 89,
        lengths=np.full(count, length),
        mask=mask,
        logprobs=numbers,
        versions=np.zeros(tokens, dtype=np.int64),
        advantages=numbers,
        weights=mask / np.float32(mask.sum()),
    )


def weighted_scores(logprobs: Tensor, weights: Tensor) -> Tensor:
    """Return a loss of a policy for a plan: any will do, as its own memory is small compared with the model's."""
    return (logprobs * weights).sum()


def weighted_values(values: Tensor, weights: Tensor) -> Tensor:
    """Return a loss of a model with a scalar head for a plan, as `weighted_scores` does for a policy."""
    return (values * weights).sum()


def engine_plan(cfg: RecipeConfig, folder: Path, name: str, machines: Machines) -> ComponentPlan:
    """Return the plan of a generator: memory for weights, keys and values, and what else its engine holds.

    Args:
        folder: with the model's config.json.
        name: of its service.
    """
    options, settings = Options(**cfg.placement(name)), cfg.generator
    on_gpus = options.with_gpus and machines.type != "cpu"
    config = model_config(folder)
    elements = count_elements(folder)
    length = round_up(check_length(config, settings.max_seq_len), BLOCK)
    per_token = token_bytes(config, getattr(torch, settings.dtype), settings.router_replay) // options.procs
    per_sequence = length * per_token + state_bytes(config)
    weights = elements * (2 if settings.dtype == "bfloat16" else 4) // options.procs

    # `most`: number of slots that would fit, where that is known.
    update = most = 0
    if settings.engine == "vllm":
        share = float(settings.vllm.get("gpu_memory_utilization", 0.9))
        others = ENGINE_MARGIN
        cache = max(0, int(share * machines.memory) - weights - others)
        most = cache // per_sequence
        sequences = min(settings.slots, most)
    else:
        # The next version is filled while this one decodes, which a colocated engine has released.
        update = 0 if cfg.colocated else weights
        logits = 4 * settings.slots * config.vocab_size * 4  # about four float32 tensors [slots, vocabulary]
        if settings.captures(config, machines.type if on_gpus else "cpu"):
            logits *= 2
        others = logits + int(settings.prefix_cache_mb * 1e6)

        # One more row, in which prompts are computed.
        cache = (round_up(settings.slots, WIDTH) + 1) * per_sequence
        if settings.cache_gb is not None:
            cache = min(cache, round(settings.cache_gb * 1e9))
        elif on_gpus:
            others += ENGINE_MARGIN
            free = max(0, int(machines.memory - CONTEXT) - weights - update - others)
            cache = min(cache, free)
            # Each slot needs a row of the cache and its logits.
            most = (free + logits) // (per_sequence + logits // settings.slots) - 1
            most -= most % WIDTH

        sequences = max(0, min(settings.slots, cache // per_sequence - 1))

    limits = f"{sequences} of {settings.slots} slots at once with sequences of full length"
    if most > settings.slots:
        limits += f"; generator.slots {most} would fit"
    parts = {"weights": weights, "next version": update, "cache": cache, "others": others}

    return ComponentPlan(
        name,
        options.procs * options.num_replicas,
        options.with_gpus,
        {part: size for part, size in parts.items() if size},
        machines.memory,
        sequences=sequences,
        limits=limits,
        elements=elements,
    )


def count_elements(folder: Path) -> int:
    """Return the number of parameters of a causal language model, from the config.json in its folder."""
    config = model_config(folder)
    # On the meta device the weights take no memory: a model of 32B is counted in .2 s.
    with META:
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return sum(weight.numel() for weight in model.parameters())


def reward_plan(
    cfg: RecipeConfig, folder: Path, machines: Machines, find: Callable[[str], Path]
) -> ComponentPlan | None:
    """Return the plan of the reward, each process of which has all its models; None if it has no model.

    Args:
        folder: with the config.json of the policy, whose sequences the models read.
        find: returns the folder of a model by its name.

    Raises:
        FileNotFoundError: the files of a verifier, which name its models, are not there yet.
    """
    verifiers = cfg.reward.verifiers
    models = [*(verifiers.planned_models() if verifiers is not None else ()), *models_of(cfg.scorers)]
    if not models:
        return None
    options = cfg.service("reward") or Options()
    reach = cfg.reach(model_config(folder))
    memory = [scoring_memory(settings, find(settings.path), reach) for settings in models]

    return ComponentPlan(
        "reward",
        options.procs * options.num_replicas,
        options.with_gpus and any(settings.device != "cpu" for settings in models),
        # The models may score at the same time, each in a thread.
        {"weights": sum(weights for weights, _ in memory), "activations": sum(passes for _, passes in memory)},
        machines.memory,
    )


def scoring_memory(settings: ModelSettings, folder: Path, length: int) -> tuple[int, int]:
    """Return the bytes of a reward model's weights, and the bytes that its forward pass of a full batch adds.

    Args:
        folder: with the model's config.json.
        length: tokens of the longest sequence that the model is given.
    """
    loader: Any = AutoModelForSequenceClassification
    if isinstance(settings, ProcessRewardModelSettings):
        loader = AutoModelForTokenClassification if settings.good is None else AutoModelForCausalLM
    config = model_config(folder)
    text_config = config.get_text_config()
    text_config.pad_token_id = text_config.pad_token_id or 0  # a run takes the tokenizer's
    with META:
        model = loader.from_config(config, dtype=getattr(torch, settings.dtype), trust_remote_code=False)

    model.eval()
    # Rows as long as they may be: the mask of attention grows with the square of the width, all other tensors with the
    # number of tokens in the batch.
    width = min(length, max_length(config), settings.max_tokens or length, settings.batch_tokens)
    rows = max(1, settings.batch_tokens // width)
    ids = torch.zeros((rows, width), dtype=torch.long, device=META)
    weights = dict(model.named_parameters())
    with measure_block(weights) as meter, torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones_like(ids))

    return sum(weight.nbytes for weight in weights.values()), max(most for _, most in meter.peaks.values())
