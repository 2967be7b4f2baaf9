"""Run a trainer's own code on the meta device, for any model and number of ranks, and add up the memory of a rank."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from forge.config.plugin import resolve
from forge.data.packing import split_batch
from forge.system.devices import planning_for
from forge.training.build import find_layers
from forge.training.distributed import Ranks, lay_out
from forge.training.experts import balance_loss
from forge.training.lora import LoraLinear, add_adapters
from forge.training.policy import Policy, ScalarModel, make_policy
from forge.training.settings import Backend, Head, LoraSettings, OptimizerSettings, Parallelism, PassSettings
from forge.training.step import Loss, loss_inputs, micro_batch_loss
from forge.training.tensor_parallel import parallelize_model
from forge.types import Batch

from .meter import Moment, divide_experts, measure_block

META = torch.device("meta")


@dataclass(frozen=True)
class Weight:
    """One weight of a rank, before FSDP divides it.

    Args:
        elements: number of elements on this rank, after tensor and expert parallelism.
        is_inner: it is in a decoder layer.
        trains: it has a gradient.
        spread: number of ranks of expert parallelism that divide it; FSDP divides it over that many times fewer ranks.
        is_resharded: it is in no layer, but is gathered only while it is used, as layers are.
    """

    elements: int
    is_inner: bool
    trains: bool
    spread: int = 1
    is_resharded: bool = False


@dataclass(frozen=True)
class Passes:
    """What the forward and backward pass of one micro-batch hold on one rank.

    Args:
        weights: by name.
        peaks: as of `Meter`, with gradients in the dtype of the passes.
        itemsize: bytes of an element in the passes.
        layers: number of decoder layers.
    """

    weights: Mapping[str, Weight]
    peaks: Mapping[Moment, tuple[int, int]]
    itemsize: int
    layers: int

    @property
    def elements(self) -> int:
        """Return the number of elements of all weights, divided by tensor parallelism only."""
        return sum(weight.elements * weight.spread for weight in self.weights.values())


def run_passes(
    model: str | Path,
    batch: Batch,
    loss: Loss,
    settings: PassSettings,
    *,
    head: Head = "policy",
    lora: LoraSettings | None = None,
    parallelism: Parallelism | None = None,
    world_size: int = 1,
    device_type: str = "cpu",
    learns: bool = True,
    backend: Backend = "fsdp",
) -> Passes:
    """Run the forward and backward pass of one micro-batch on the meta device, and return the memory that they hold.

    Args:
        model: a folder with config.json; weights are not read.
        batch: of all data ranks; the first pack of the first rank is run.
        loss: of the algorithm.
        head: of the model.
        lora: settings of adapters; None to train all weights.
        parallelism: degrees; None for data parallelism only.
        world_size: number of ranks.
        device_type: that the code is run for: "cpu" or the type of a GPU.
        learns: whether there is a backward pass.
        backend: with "titan" mixtures of experts compute as TorchTitan's do; the other modules are assumed to be alike.

    Raises:
        ValueError: a model or degrees that the trainer rejects.
    """
    dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
    layout = (parallelism or Parallelism()).over(world_size)
    with ranks_of(layout, world_size) as ranks, planning_for(device_type):
        policy = _build_meta(model, head, dtype, settings.gradient_checkpointing, lora, ranks)
        if backend == "titan":
            resolve("forge_titan.setup:check_model", "trainer.backend")(policy.model.config)
            resolve("forge_titan.setup:check_layout", "trainer.backend")(
                layout, AutoConfig.from_pretrained(model, trust_remote_code=False)
            )
            divide_experts(policy, ranks.experts, device_type != "cpu" and dtype == torch.bfloat16)

        policy.ranks = ranks
        policy.train()
        # In a pipeline the embedding is on other ranks than the head, which is as large and needs more memory.
        weights = {name: w for name, w in policy.named_parameters() if layout.stages == 1 or "embed_tokens" not in name}
        local = {name: w.to_local() if isinstance(w, DTensor) else w for name, w in weights.items()}
        pack = split_batch(batch, ranks=ranks.data.size, max_tokens=settings.seq_len)[0][0]

        with measure_block(weights) as meter, torch.set_grad_enabled(learns):
            output = policy(pack, 1.0)
            # The first group runs ahead of the last by its distance, with two stages by half as much again, and holds
            # the activations of these micro-batches as well.
            ahead = int(learns * meter.held * (ranks.pipeline.size - 1) * (1 + ranks.stages / ranks.pipeline.size) / 2)
            if learns:
                value = micro_batch_loss(loss, pack, loss_inputs(pack, output), output)
                if policy.routers is not None:
                    load = policy.routers.take()
                    value = value + balance_loss(load, load.detach().double(), policy.routers.k)
                value.backward()
                del value
            del output

        # TorchTitan shards an embedding on its own, unless it is the head as well.
        is_untied = any(name.endswith("lm_head.weight") for name in weights)
        resharded = ("embed_tokens.weight",) if backend == "titan" and is_untied else ()
        # Matrices in four bits, with a scale for each block of 64, are whole on every rank.
        is_packed = lora is not None and lora.quantize is not None
        adapted = {f"{name}.weight" for name, module in policy.named_modules() if isinstance(module, LoraLinear)}
        share = (
            (0.5 + 4 / 64)
            / ITEMSIZE[settings.weights_dtype]
            * (world_size // (layout.data_parallel_replicate_degree or 1))
        )
        described = {
            name: Weight(
                int(tensor.numel() * share) if is_packed and name in adapted else tensor.numel(),
                is_inner=".layers." in name,
                trains=weights[name].requires_grad,
                spread=ranks.experts if tensor.dim() > 2 else 1,
                is_resharded=name.endswith(resharded),
            )
            for name, tensor in local.items()
        }
        peaks = {moment: (first + ahead, most + ahead) for moment, (first, most) in meter.peaks.items()}
        return Passes(described, peaks, dtype.itemsize, len(find_layers(policy.model)))


@contextmanager
def ranks_of(parallelism: Parallelism, world_size: int) -> Iterator[Ranks]:
    """Yield the first of `world_size` ranks in a fake process group, where collectives return at once."""
    if world_size == 1:
        yield Ranks(0, 1, META, None)
        return
    import torch.distributed._tools.fake_collectives  # collectives of the meta device
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield replace(lay_out(parallelism, torch.device("cpu")), device=META)
    finally:
        dist.destroy_process_group()


def _build_meta(
    model: str | Path,
    head: Head,
    dtype: torch.dtype,
    gradient_checkpointing: bool,
    lora: LoraSettings | None,
    ranks: Ranks,
) -> Policy | ScalarModel:
    options: dict[str, Any] = {} if head == "policy" else {"num_labels": 1}
    kind: Any = AutoModelForCausalLM if head == "policy" else AutoModelForSequenceClassification
    config = AutoConfig.from_pretrained(model, **options, trust_remote_code=False)
    if ranks.stages > 1:
        # Embedding and head count as a layer each. The first group holds the most micro-batches, and the others as much
        # only if they have few layers.
        layers = -(-(config.num_hidden_layers + 2) // ranks.stages) * (ranks.stages // ranks.pipeline.size)
        config.num_hidden_layers = layers - (layers >= ranks.pipeline.size)
    with META:
        built = kind.from_config(config, dtype=dtype, attn_implementation="eager", trust_remote_code=False)

    if gradient_checkpointing:
        with warnings.catch_warnings():
            # This method is deprecated, but not all supported versions of transformers have its successor.
            warnings.simplefilter("ignore", FutureWarning)
            built.gradient_checkpointing_enable({"use_reentrant": False})

    policy = make_policy(built) if head == "policy" else ScalarModel(built, lag=1 if head == "value" else 0)
    degrees = Parallelism(tensor_parallel_degree=ranks.tensor.size, context_parallel_degree=ranks.context.size)
    degrees.check(built.config)

    # Adapters are made with values, which are drawn by their names: move them to the meta device too.
    if lora is not None:
        add_adapters(built, lora)
        policy.to(META)

    if ranks.tensor.size > 1:
        parallelize_model(built, ranks)
    return policy


FLOAT = 4  # bytes: gradients are summed in float32
ITEMSIZE = {"float32": 4, "bfloat16": 2}  # bytes


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes that a trainer rank holds at one moment, by kind: weights, gradients, optimizer state, activations and
    gathered weights.

    gathered: weights that FSDP has gathered from other ranks, and its buffers. moment: its name.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int
    moment: str = ""

    @property
    def total(self) -> int:
        """Return the sum of the bytes of all kinds."""
        return sum(value for value in asdict(self).values() if isinstance(value, int))


def trainer_memory(
    passes: Passes,
    settings: PassSettings,
    optimizer: OptimizerSettings,
    *,
    shards: int | None = None,
    micro_batches: int = 1,
    gloo: bool = False,
    learns: bool = True,
) -> TrainerMemory:
    """Return the memory of a trainer's rank at the moment when it needs the most.

    Args:
        passes: of one micro-batch.
        shards: number of ranks over which FSDP divides the weights; None for one process without FSDP.
        micro_batches: number in an update; more than 2 are as 2.
        gloo: the collectives are those of gloo, which sums gradients in a copy.
        learns: whether it has gradients and an optimiser; a reference model has none.
    """
    # Held at every moment: this rank's part of weights and state, and of gradients once they are summed.
    itemsize, parts = ITEMSIZE[settings.weights_dtype], shards or 1
    trained = [weight for weight in passes.weights.values() if weight.trains and learns]
    elements = sum(weight.elements for weight in passes.weights.values())
    learned = sum(weight.elements for weight in trained)
    weights = _count_sharded(passes.weights.values()) * itemsize // parts
    gradients = _count_sharded(trained) * itemsize // parts

    state = sum(state_bytes(weight, settings, optimizer) * weight.spread for weight in trained) // parts
    update = max((update_bytes(weight, settings, optimizer, parts) for weight in trained), default=0)

    # The summed gradient is kept without a copy, unless it is added to an earlier one or cast.
    copied = FLOAT if micro_batches > 1 or itemsize != FLOAT else 0
    size = passes.itemsize
    inner = sum(weight.elements for weight in passes.weights.values() if weight.is_inner)
    stays = sum(weight.elements for weight in passes.weights.values() if not (weight.is_inner or weight.is_resharded))
    learned_inner = sum(weight.elements for weight in trained if weight.is_inner)
    learned_layer = learned_inner // passes.layers
    sharded_layer = _count_sharded(weight for weight in trained if weight.is_inner) // passes.layers

    # The update of the weights is one of the moments; the passes have the others.
    moments = [TrainerMemory(weights, gradients, state, update, 0, "update of the weights")]
    for moment, (first, most) in passes.peaks.items():
        if shards is None:
            complete = learned * itemsize if micro_batches > 1 else sum(moment)
            moments.append(TrainerMemory(weights, complete, state, most, 0, _next_phase(sum(moment))))
            continue

        # FSDP2 gathers the layer that is computed and the next one in the dtype of the passes, keeps gathered what is
        # in no layer, and has undivided gradients of a layer until all of them are complete.
        complete_layers = moment.layers // (size * learned_layer) if learned_layer else 0
        current = moment.layers - complete_layers * size * learned_layer
        reduced = gradients if micro_batches > 1 else complete_layers * sharded_layer * itemsize // parts
        gathered = size * stays + 2 * size * (inner // passes.layers)

        # FSDP2 keeps the buffer of one layer's gradients while the next layer's are computed.
        held = FLOAT * learned_layer if complete_layers else 0
        moments.append(
            TrainerMemory(
                weights, reduced + current + moment.root, state, most, gathered + held, _next_phase(sum(moment))
            )
        )
        if complete_layers and not current:
            summed = FLOAT * learned_layer * (1 + gloo) + copied * sharded_layer // parts
            undivided = reduced + size * learned_layer + moment.root
            moments.append(TrainerMemory(weights, undivided, state, first, gathered + summed, "sum of gradients"))

    # Gradients of weights in no layer, embedding and head, are summed after the backward pass. They are the largest.
    if shards is not None and trained:
        root = learned - learned_inner
        last = min(first for first, _ in passes.peaks.values())
        summed = FLOAT * root * (1 + gloo) + copied * root // parts
        gathered = size * (elements - inner) + summed
        moments.append(
            TrainerMemory(weights, gradients + size * root, state, last, gathered, "sum of the last gradients")
        )

    return max(moments, key=lambda moment: moment.total)


def _count_sharded(weights: Iterable[Weight]) -> int:
    """Return the number of elements of these weights, divided by tensor parallelism only."""
    return sum(weight.elements * weight.spread for weight in weights)


def state_bytes(weight: Weight, settings: PassSettings, optimizer: OptimizerSettings) -> int:
    """Return the bytes of AdamW's state of a weight, before FSDP divides it; see `forge.training.optimizers`."""
    # Two moments; for weights in bfloat16 with float32 moments also the part of a weight that is rounded off.
    dtype = optimizer.optimizer_dtype or settings.weights_dtype
    remainder = 2 if (settings.weights_dtype, dtype) == ("bfloat16", "float32") else 0
    return weight.elements * (2 * ITEMSIZE[dtype] + remainder)


def update_bytes(weight: Weight, settings: PassSettings, optimizer: OptimizerSettings, parts: int) -> int:
    """Return the temporary bytes on a rank while the optimiser updates one weight, divided over `parts` ranks."""
    dtype = optimizer.optimizer_dtype or settings.weights_dtype
    if dtype == settings.weights_dtype:
        return 0  # fused
    # In float32: weight and gradient if they are in bfloat16, and both moments if they are.
    copies = (settings.weights_dtype == "bfloat16") * 2 + (dtype == "bfloat16") * 2
    return weight.elements * weight.spread * FLOAT * copies // parts


def _next_phase(gradients: int) -> str:
    return "backward pass" if gradients else "forward pass or its end"
