"""The memory of the components that hold the model to train or to score with: trainer, critic, reference model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from torch import Tensor
from transformers import PreTrainedConfig

from forge.recipes.schema import TrainingRecipe
from forge.runtime.controller import Options
from forge.training.settings import Head, OptimizerSettings, PassSettings
from forge.types import Batch

from .devices import CONTEXT, Machines
from .memory import trainer_memory
from .passes import run_passes

MARGIN = 0.06  # of a GPU's memory: fragments, and the error of the plan


@dataclass(frozen=True)
class ComponentPlan:
    """The memory of each process of a component.

    parts: bytes by name. limits: what bounds a component that takes all memory that is left. elements: parameters.
    """

    name: str
    processes: int
    with_gpus: bool
    parts: dict[str, int]
    capacity: float
    moment: str = ""
    limits: str = ""
    has_room: bool = True  # for what it has to hold, where it takes all that there is
    elements: int = 0

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


def trainer_plan(
    cfg: TrainingRecipe, config: PreTrainedConfig, folder: Path, name: str, machines: Machines
) -> ComponentPlan:
    """The plan of one component.

    Args:
        name: of its service: trainer, critic, ref_model, or one of a further policy, `models.rival.trainer`.

    Raises:
        ValueError: a model, or degrees of parallelism, that the trainer rejects.
    """
    options = Options(**cfg.placement(name))
    kind = kind_of(name)
    layout = cfg.layout(name).over(options.procs)
    settings = PassSettings(**cfg.training.trainer())
    learns = kind != "ref_model"
    device_type = machines.device.type if options.with_gpus else "cpu"
    # One process computes in bfloat16 by way of FSDP on a GPU, as `forge.training.distributed.join` makes it.
    has_mesh = options.procs > 1 or (device_type != "cpu" and (settings.dtype == "bfloat16" or settings.cpu_offload))
    head: Head = "value" if kind == "critic" else ("reward" if hasattr(cfg, "reward_model") else "policy")
    # A micro-batch is full, and an update has several of them where a pack does not hold the batch.
    data = options.procs // (layout.tensor_parallel_degree * layout.context_parallel_degree)
    seq_len = cfg.training.seq_len
    length = min(cfg.reach(config), seq_len)
    passes = run_passes(
        folder,
        full_batch(seq_len, length, data),
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
        OptimizerSettings(**cfg.training.optimizer_settings()),
        shards=layout.data_parallel_shard_degree * layout.context_parallel_degree if has_mesh else None,
        micro_batches=2 if cfg.training.batch_size * samples_of(cfg) * length > seq_len * data else 1,
        gloo=device_type == "cpu",
        learns=learns,
    )
    parts = {part: size for part, size in asdict(memory).items() if part != "moment"}
    if cfg.training.cpu_offload and learns:
        # FSDP2 keeps these in host memory, where the optimiser computes too.
        parts |= {"weights": 0, "gradients": 0, "optimizer": 0}
    return ComponentPlan(
        name,
        options.procs * options.num_replicas,
        options.with_gpus,
        {part: size for part, size in parts.items() if size},
        machines.device.memory,
        memory.moment,
        elements=passes.elements * layout.tensor_parallel_degree,
    )


def kind_of(service: str) -> str:
    """The kind of a service, also of a further model: `trainer` of `models.rival.trainer`."""
    return service.rpartition(".")[2]


def samples_of(cfg: TrainingRecipe) -> int:
    """Sequences of a row of the batch."""
    sampling = getattr(cfg, "grpo", None) or getattr(cfg, "distill", None)
    return sampling.n_samples if sampling is not None else 1


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
