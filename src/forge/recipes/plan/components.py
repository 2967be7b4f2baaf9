"""The plan of a configuration: each component's memory, a step's seconds, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from ...models.architecture import sparse_layers
from ...runtime.controller import Options
from ...training.policy import Head
from ...training.settings import OptimizerSettings, PassSettings
from ...types import Batch
from ..rl_config import RLConfig
from ..schema import RecipeConfig, TrainingRecipe
from .devices import CONTEXT, Machines
from .generation import EngineMemory, engine_memory
from .memory import TrainerMemory, trainer_memory
from .passes import Passes, run_passes
from .times import Work, generation_seconds, scoring_seconds, training_seconds, update_seconds

MARGIN = 0.06  # of a GPU's memory: fragments, and the error of the plan
PROMPT = 0.5  # of the longest prompt and the longest completion: their means, where no run has measured them
DEVICES_PER_HOST = 8


@dataclass(frozen=True)
class ComponentPlan:
    """The memory of each process of a component.

    parts: bytes by name. limits: what bounds a component that takes all memory that is left.
    """

    name: str
    processes: int
    with_gpus: bool
    parts: dict[str, int]
    capacity: float
    moment: str = ""
    limits: str = ""
    has_room: bool = True  # for what it has to hold, where it takes all that there is

    @property
    def total(self) -> float:
        """Bytes of a process, with the driver's where it has a GPU."""
        return sum(self.parts.values()) + (CONTEXT if self.with_gpus else 0)

    @property
    def fits(self) -> bool:
        """Whether it fits its device, with a margin."""
        return self.has_room and (not self.with_gpus or bool(self.limits) or self.total <= self.bound)

    @property
    def bound(self) -> float:
        """Bytes that a process may take."""
        return self.capacity * (1 - MARGIN)


@dataclass
class Plan:
    """The plan of a configuration.

    seconds: of a step's phases by name; empty without GPUs. notes: what to know, or to change. work: of a step.
    sequences: that an engine runs at once. decode_weights, token_bytes: what a decode step reads, and of each token.
    """

    model: str
    elements: int
    machines: Machines
    components: list[ComponentPlan] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    step_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    work: Work | None = None
    sequences: int = 0
    decode_weights: float = 0.0
    token_bytes: float = 0.0

    @property
    def devices(self) -> int:
        """GPUs that the configuration asks for."""
        return sum(component.processes for component in self.components if component.with_gpus)

    @property
    def fits(self) -> bool:
        """Whether every component fits, and there are enough GPUs."""
        return all(component.fits for component in self.components) and self.devices <= self.machines.count


def make_plan(cfg: TrainingRecipe, folder: Path, name: str, machines: Machines) -> Plan:
    """The plan of a configuration, without weights and without a GPU.

    Args:
        folder: with the model's config.json; name: of the model.

    Raises:
        ValueError: a model, or degrees of parallelism, that the trainer rejects.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    trainer = _trainer(cfg, config, folder, "trainer", machines)
    elements = trainer.elements
    plan = Plan(name, elements, machines, [trainer.plan])
    for service in ("critic", "ref_model"):
        options = cfg.service(service)
        if options is not None and service not in cfg.idle:
            plan.components.append(_trainer(cfg, config, folder, service, machines).plan)
    engine = _engine(cfg, config, elements, machines)
    if engine is not None:
        plan.components.append(engine[0])
        if engine[1].sequences < 2:
            plan.notes.append("generator: not two sequences of full length fit: lower generator.max_seq_len")
    _add_seconds(plan, cfg, config, trainer, engine and engine[1])
    _add_notes(plan, cfg, folder, trainer)
    return plan


@dataclass(frozen=True)
class _Trainer:
    plan: ComponentPlan
    memory: TrainerMemory
    elements: int
    ranks: int


def _trainer(
    cfg: TrainingRecipe, config: PreTrainedConfig, folder: Path, name: str, machines: Machines, seq_len: int = 0
) -> _Trainer:
    options: Options = cfg.services[name]
    passes, memory = _memory(cfg, config, folder, name, machines, seq_len or cfg.training.seq_len)
    divided = cfg.layout(name).over(options.procs)
    elements = sum(weight.elements for weight in passes.weights.values()) * divided.tensor_parallel_degree
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "gathered": memory.gathered,
    }
    if cfg.training.cpu_offload and name != "ref_model":
        # FSDP2 keeps these in host memory, where the optimiser computes too.
        parts |= {"weights": 0, "gradients": 0, "optimizer": 0}
    plan = ComponentPlan(
        name,
        options.procs * options.num_replicas,
        options.with_gpus,
        {part: size for part, size in parts.items() if size},
        machines.device.memory,
        memory.moment,
    )
    return _Trainer(plan, memory, elements, options.procs)


def _memory(
    cfg: TrainingRecipe, config: PreTrainedConfig, folder: Path, name: str, machines: Machines, seq_len: int
) -> tuple[Passes, TrainerMemory]:
    options: Options = cfg.services[name]
    layout = cfg.layout(name).over(options.procs)
    settings = PassSettings(**{**cfg.training.trainer(), "seq_len": seq_len})
    learns = name != "ref_model"
    device_type = machines.device.type if options.with_gpus else "cpu"
    # One process computes in bfloat16 by way of FSDP on a GPU, as `forge.training.distributed.join` makes it.
    has_mesh = options.procs > 1 or (device_type != "cpu" and (settings.dtype == "bfloat16" or settings.cpu_offload))
    head: Head = "value" if name == "critic" else ("reward" if hasattr(cfg, "reward_model") else "policy")
    # A micro-batch is full, and an update has several of them where a pack does not hold the batch.
    data = options.procs // (layout.tensor_parallel_degree * layout.context_parallel_degree)
    length = min(cfg.reach(config), seq_len)
    passes = run_passes(
        folder,
        full_batch(seq_len, length, data),
        weighted_scores if head == "policy" else weighted_values,
        settings,
        head=head,
        lora=cfg.lora if name == "trainer" else None,
        parallelism=layout,
        world_size=options.procs,
        device_type=device_type,
        learns=learns,
    )
    shards = layout.data_parallel_shard_degree * layout.context_parallel_degree if has_mesh else None
    accumulates = cfg.training.batch_size * samples_of(cfg) * length > seq_len * data
    memory = trainer_memory(
        passes,
        settings,
        OptimizerSettings(**cfg.training.optimizer_settings()),
        shards=shards,
        micro_batches=2 if accumulates else 1,
        gloo=device_type == "cpu",
        learns=learns,
    )
    return passes, memory


def full_batch(seq_len: int, length: int, ranks: int) -> Batch:
    """A batch of one pack of `seq_len` tokens for each rank, of sequences of this length, which are trained whole."""
    count = max(1, seq_len // length) * ranks
    tokens = count * length
    mask = np.ones(tokens, dtype=bool)
    mask[::length] = False
    numbers = np.zeros(tokens, dtype=np.float32)
    return Batch(
        # Different beginnings: no prefix is shared.
        tokens=np.arange(tokens) % 97 + np.repeat(np.arange(count), length) % 89,
        lengths=np.full(count, length),
        mask=mask,
        logprobs=numbers,
        versions=np.zeros(tokens, dtype=np.int64),
        advantages=numbers,
        weights=mask / np.float32(mask.sum()),
    )


def weighted_scores(logprobs: Tensor, weights: Tensor) -> Tensor:
    """Any loss of a policy: what it holds for a token is nothing beside the token's activations."""
    return (logprobs * weights).sum()


def weighted_values(values: Tensor, weights: Tensor) -> Tensor:
    """The same of a scalar head."""
    return (values * weights).sum()


def samples_of(cfg: TrainingRecipe) -> int:
    """Sequences of a row of the batch."""
    sampling = getattr(cfg, "grpo", None) or getattr(cfg, "distill", None)
    return sampling.n_samples if sampling is not None else 1


def _engine(
    cfg: TrainingRecipe, config: PreTrainedConfig, elements: int, machines: Machines
) -> tuple[ComponentPlan, EngineMemory] | None:
    options = cfg.service("generator")
    if options is None or not isinstance(cfg, RecipeConfig) or cfg.engine is None:
        return None
    device = machines.device if options.with_gpus else replace(machines.device, type="cpu")
    memory = engine_memory(config, elements, cfg.generator, options.procs, device)
    parts = {"weights": memory.weights, "next version": memory.update, "cache": memory.cache, "others": memory.others}
    limits = f"{memory.sequences} sequences of full length at once"
    plan = ComponentPlan(
        "generator",
        options.procs * options.num_replicas,
        options.with_gpus,
        {name: size for name, size in parts.items() if size},
        device.memory,
        limits=limits,
        has_room=memory.sequences >= 2,
    )
    return plan, memory


def _add_seconds(
    plan: Plan, cfg: TrainingRecipe, config: PreTrainedConfig, trainer: _Trainer, engine: EngineMemory | None
) -> None:
    if plan.machines.device.type == "cpu" or not trainer.plan.with_gpus:
        return
    device = plan.machines.device
    length = min(cfg.reach(config), cfg.training.seq_len)
    # Lengths are known once a run has measured them: until then they are half of what they may be.
    sampling = getattr(cfg, "grpo", None) or getattr(cfg, "distill", None)
    longest = min(length, sampling.max_tokens) if sampling is not None else length
    completion = PROMPT * longest
    prompt = PROMPT * max(1, length - longest)
    work = Work(cfg.training.batch_size * samples_of(cfg), prompt, completion)
    plan.work = work
    settings = cfg.training
    plan.seconds["training"] = training_seconds(config, work, device, trainer.ranks, settings.gradient_checkpointing)
    reference = cfg.service("ref_model")
    if reference is not None and "ref_model" not in cfg.idle:
        ranks = reference.procs * reference.num_replicas
        plan.seconds["reference"] = scoring_seconds(config, work, device, ranks)
    generator = cfg.service("generator")
    if engine is None or generator is None or sampling is None or not isinstance(cfg, RecipeConfig):
        plan.step_seconds = sum(plan.seconds.values())
        return
    itemsize = 2 if cfg.generator.dtype == "bfloat16" else 4
    plan.sequences = engine.sequences
    plan.decode_weights = active_elements(config, plan.elements) * itemsize / generator.procs
    plan.token_bytes = engine.token_bytes
    plan.seconds["generation"] = generation_seconds(
        config,
        work,
        device,
        replicas=generator.num_replicas,
        slots=max(1, engine.sequences),
        weights=plan.decode_weights,
        token_bytes=plan.token_bytes,
        launches=cfg.generator.engine == "embedded",
    )
    hosts = -(-plan.devices // DEVICES_PER_HOST)
    plan.seconds["weights"] = update_seconds(plan.elements * itemsize, device, hosts)
    training = sum(seconds for name, seconds in plan.seconds.items() if name != "generation")
    age = cfg.async_.max_policy_age if isinstance(cfg, RLConfig) else 0
    # Old samples may be trained: generation runs beside training, and the slower one sets the pace.
    overlapped = max(plan.seconds["generation"], training)
    plan.step_seconds = overlapped if age else plan.seconds["generation"] + training


def active_elements(config: PreTrainedConfig, elements: int) -> float:
    """Parameters that are read for one token: of a mixture those of the chosen experts."""
    layers = len(sparse_layers(config))
    if not layers:
        return elements
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    idle = config.num_experts - config.num_experts_per_tok
    return elements - layers * idle * 3 * config.hidden_size * width


def _add_notes(plan: Plan, cfg: TrainingRecipe, folder: Path, trainer: _Trainer) -> None:
    if plan.machines.device.type == "cpu" or not trainer.plan.with_gpus:
        return
    if plan.devices > plan.machines.count:
        plan.notes.append(f"{plan.devices} GPUs are asked for, and there are {plan.machines.count}")
    if not trainer.plan.fits:
        plan.notes += list(_remedies(plan, cfg, folder, trainer))
    if "generation" in plan.seconds:
        longest = max(plan.seconds, key=plan.seconds.__getitem__)
        share = plan.seconds[longest] / plan.step_seconds
        plan.notes.append(f"{longest} takes longest, {share:.0%} of a step: give it more GPUs first")


def _remedies(plan: Plan, cfg: TrainingRecipe, folder: Path, trainer: _Trainer) -> Iterator[str]:
    """The changes that make the trainer fit, found by planning each."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    remedy = ""
    if not cfg.training.gradient_checkpointing:
        # The cheapest remedy, and a part of the others where it is not enough.
        remedy = "training.gradient_checkpointing and "
        recomputing = cfg.training.model_copy(update={"gradient_checkpointing": True})
        cfg = cfg.model_copy(update={"training": recomputing})
        candidate = _trainer(cfg, config, folder, "trainer", plan.machines)
        if candidate.plan.fits:
            yield f"the trainer fits with training.gradient_checkpointing: {candidate.plan.total / 1e9:.1f} GB"
            return
    # More ranks divide weights and state; shorter packs leave fewer activations, and come last as they bound answers.
    ranks = trainer.ranks * 2
    while ranks <= 8 * trainer.ranks:
        services = cfg.services.model_copy(update={"trainer": cfg.services.trainer.model_copy(update={"procs": ranks})})
        candidate = _trainer(cfg.model_copy(update={"services": services}), config, folder, "trainer", plan.machines)
        if candidate.plan.fits:
            yield f"the trainer fits with {remedy}services.trainer.procs {ranks}: {candidate.plan.total / 1e9:.1f} GB"
            return
        ranks *= 2
    seq_len = cfg.training.seq_len // 2
    while seq_len >= 512:
        candidate = _trainer(cfg, config, folder, "trainer", plan.machines, seq_len)
        if candidate.plan.fits:
            yield f"the trainer fits with {remedy}training.seq_len {seq_len}: {candidate.plan.total / 1e9:.1f} GB"
            return
        seq_len //= 2
    yield "the trainer fits with none of: recomputed activations, more GPUs of a host, a shorter training.seq_len"
