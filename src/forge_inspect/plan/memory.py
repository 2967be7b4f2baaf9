"""The memory of a trainer's rank at its peak, from what its passes hold and how its weights are divided."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from forge.training.settings import OptimizerSettings, PassSettings

from .passes import Passes, Weight

FLOAT = 4  # bytes: gradients are summed in float32
ITEMSIZE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes of a rank's parts at the moment when they are the most together."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int
    moment: str = ""

    @property
    def total(self) -> int:
        """All of it, on the device."""
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
    """The peak of a rank of a trainer.

    Args:
        shards: ranks that divide the weights between them; None: one process without a mesh.
        micro_batches: of an update.
        gloo: the collectives are gloo's, which sums gradients in a copy.
        learns: whether it has gradients and an optimiser; a reference model has none.
    """
    # What is there at every moment: this rank's part of weights and state, and of gradients once they are summed.
    itemsize = ITEMSIZE[settings.weights_dtype]
    parts = shards or 1
    trained = [weight for weight in passes.weights.values() if weight.trains and learns]
    elements = sum(weight.elements for weight in passes.weights.values())
    learned = sum(weight.elements for weight in trained)
    weights = _sharded(passes.weights.values()) * itemsize // parts
    gradients = _sharded(trained) * itemsize // parts
    state = sum(state_bytes(weight, settings, optimizer) * weight.spread for weight in trained) // parts
    update = max((update_bytes(weight, settings, optimizer, parts) for weight in trained), default=0)
    # The sum of gradients is what becomes of it, unless it is added to an earlier one or cast.
    copied = FLOAT if micro_batches > 1 or itemsize != FLOAT else 0
    size = passes.itemsize
    inner = sum(weight.elements for weight in passes.weights.values() if weight.is_inner)
    stays = sum(weight.elements for weight in passes.weights.values() if not (weight.is_inner or weight.is_resharded))
    learned_inner = sum(weight.elements for weight in trained if weight.is_inner)
    learned_layer = learned_inner // passes.layers
    sharded_layer = _sharded(weight for weight in trained if weight.is_inner) // passes.layers
    # The update of the weights is one of the moments; the passes have the others.
    moments = [TrainerMemory(weights, gradients, state, update, 0, "update of the weights")]
    for moment, (first, most) in passes.peaks.items():
        if shards is None:
            complete = learned * itemsize if micro_batches > 1 else sum(moment)
            moments.append(TrainerMemory(weights, complete, state, most, 0, _phase(sum(moment))))
            continue
        # FSDP2: the layer that is computed and the next one are gathered in the dtype of the passes, all that is in no
        # layer stays so, and gradients are whole until their layer is complete.
        complete_layers = moment.layers // (size * learned_layer) if learned_layer else 0
        current = moment.layers - complete_layers * size * learned_layer
        reduced = gradients if micro_batches > 1 else complete_layers * sharded_layer * itemsize // parts
        gathered = size * stays + 2 * size * (inner // passes.layers)
        # FSDP2 keeps the buffer of one layer's gradients while the next layer's are computed.
        held = FLOAT * learned_layer if complete_layers else 0
        moments.append(
            TrainerMemory(weights, reduced + current + moment.root, state, most, gathered + held, _phase(sum(moment)))
        )
        if complete_layers and not current:
            summed = FLOAT * learned_layer * (1 + gloo) + copied * sharded_layer // parts
            whole = size * learned_layer
            moments.append(
                TrainerMemory(
                    weights, reduced + whole + moment.root, state, first, gathered + summed, "sum of gradients"
                )
            )
    # What is in no layer is summed when the backward pass is over: the embedding and the head, the largest weights.
    if shards is not None and trained:
        root = learned - learned_inner
        last = min(first for first, _ in passes.peaks.values())
        summed = FLOAT * root * (1 + gloo) + copied * root // parts
        whole = size * root
        gathered = size * (elements - inner)
        moments.append(
            TrainerMemory(weights, gradients + whole, state, last, gathered + summed, "sum of the last gradients")
        )
    return max(moments, key=lambda moment: moment.total)


def _sharded(weights: Iterable[Weight]) -> int:
    """Elements of these weights before any rank divides them but those of tensor parallelism."""
    return sum(weight.elements * weight.spread for weight in weights)


def state_bytes(weight: Weight, settings: PassSettings, optimizer: OptimizerSettings) -> int:
    """Return the bytes of AdamW's state of a weight, see `forge.training.optimizers`."""
    dtype = optimizer.optimizer_dtype or settings.weights_dtype
    remainder = 2 if (settings.weights_dtype, dtype) == ("bfloat16", "float32") else 0
    return weight.elements * (2 * ITEMSIZE[dtype] + remainder)


def update_bytes(weight: Weight, settings: PassSettings, optimizer: OptimizerSettings, parts: int) -> int:
    """Return the bytes that the update of one weight holds for a moment on a rank."""
    dtype = optimizer.optimizer_dtype or settings.weights_dtype
    if dtype == settings.weights_dtype:
        return 0  # fused
    singles = FLOAT * ((settings.weights_dtype == "bfloat16") * 2 + (dtype == "bfloat16") * 2)
    return weight.elements * weight.spread * singles // parts


def _phase(gradients: int) -> str:
    return "backward pass" if gradients else "forward pass or its end"
