"""A model of TorchTitan in stages, over groups of ranks, which torch's schedules of pipelines run."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Placement

from forge.training.distributed import Ranks
from forge.training.policy import RankTokens, TokenScores, rank_tokens
from forge.types import Batch

from .policy import TitanPolicy

# isort: split
from torchtitan.models.common.decoder import Decoder


def keep_stage(model: Decoder, stage: int, stages: int) -> Decoder:
    """Remove from a model what is not in this stage, and return it. Embedding and head count as a layer each, as in
    TorchTitan."""
    head = len(model.layers)
    kept = np.array_split(np.arange(-1, head + 1), stages)[stage].tolist()
    for name in list(model.layers):
        if int(name) not in kept:
            del model.layers[name]
    if -1 not in kept:
        model.tok_embeddings = None
    if head not in kept:
        model.norm = model.lm_head = None
    return model


class Stage(nn.Module):
    """The computation of a stage in one run of a schedule.

    Args:
        turns: the tokens of each micro-batch.
        longest: tokens of the states that stages send to each other.
        scores: gets what the last stage computes for each micro-batch, by its number.
    """

    def __init__(
        self,
        policy: "StagedPolicy",
        part: Decoder,
        turns: list[RankTokens],
        longest: int,
        temperature: float,
        scores: dict[int, Tensor],
    ) -> None:
        super().__init__()
        self.policy, self.part, self.turns, self.scores = policy, part, turns, scores
        self.longest, self.temperature = longest, temperature

    def forward(self, states: Tensor, number: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the states [1, longest, dim] of a micro-batch after this stage; after the last one the fields of
        `TokenScores`.

        Args:
            states: of the stage before; the first stage reads tokens instead.
            number: of the micro-batch, [1].
        """
        local, placement = self.turns[int(number)], self.policy.placement
        if self.part.tok_embeddings is not None:
            states = local.gathered[None]
        else:
            states = states[:, : len(local.tokens)]
            states = DTensor.from_local(states, *placement, run_check=False) if placement else states

        hidden = self.part(states, local.positions[None], (local.layout, self.policy.ranks.context))
        if self.part.lm_head is not None:
            scored = self.policy.score_states(hidden, local, self.temperature)
            self.scores[int(number)] = scored[0].detach()
            return scored
        hidden = hidden.to_local() if isinstance(hidden, DTensor) else hidden
        return F.pad(hidden, (0, 0, 0, self.longest - hidden.shape[1]))


class StagedPolicy(TitanPolicy):
    """A causal language model of TorchTitan, of which this rank has some stages.

    Args:
        parts: its stages in their order, each with the layers that it computes.
        dtype: of the states between stages.
        placement: mesh and placements of these states, if tensor parallelism divides them.
    """

    def __init__(
        self,
        parts: list[Decoder],
        folder: Path,
        ranks: Ranks,
        dtype: torch.dtype,
        placement: tuple[DeviceMesh, list[Placement]] | None,
    ) -> None:
        # One model of all own layers, so that parameters have the names that they have without a pipeline.
        model: Any = nn.Module()
        for part in parts:
            part._skip_lm_head = True
            for name in ("tok_embeddings", "norm", "lm_head"):
                if (module := getattr(part, name)) is not None:
                    model.add_module(name, module)
        model.layers = nn.ModuleDict({name: layer for part in parts for name, layer in part.layers.items()})
        super().__init__(model, folder, ranks)
        self._parts, self._dtype, self.placement = tuple(parts), dtype, placement

        # The rank in the pipeline, and the shape, of each weight.
        own_shapes = [(name, tuple(parameter.shape)) for name, parameter in self.named_weights()]
        shapes_by_rank = [own_shapes] * ranks.pipeline.size
        dist.all_gather_object(shapes_by_rank, own_shapes, group=ranks.pipeline.group)
        self._owners = {name: (rank, shape) for rank, shapes in enumerate(shapes_by_rank) for name, shape in shapes}

    def run_stages(
        self,
        micro_batches: list[Batch],
        temperature: float,
        compute_loss: Callable[[int, TokenScores], Tensor] | None = None,
    ) -> list[Tensor]:
        """Run all stages on micro-batches; return the log-probabilities of their tokens with mask True, [trained] each,
        or 0 on ranks without the last stage. Every rank must call this.

        Args:
            compute_loss: returns the loss of a micro-batch, given its number and scores: it is called where the last
                stage is, and gradients are added up on all ranks. None: forward pass only.

        Raises:
            Exception: what `compute_loss` has raised, on all ranks of the pipeline.
        """
        ranks, pipeline = self.ranks, self.ranks.pipeline
        # Schedules need a micro-batch for each rank, and Interleaved1F1B the same number in all of its rounds: the last
        # one is repeated without trained tokens.
        count = max(len(micro_batches), pipeline.size)
        while ranks.stages > pipeline.size and count % (count // pipeline.size):
            count += 1
        last = micro_batches[-1]
        padded = micro_batches + [replace(last, mask=np.zeros_like(last.mask))] * (count - len(micro_batches))

        # A stage receives states of one shape only, which it is given: those of shorter packs are padded on the way,
        # not in the computation.
        turns = [rank_tokens(micro, 1, ranks) for micro in padded]
        longest = max(len(turn.tokens) for turn in turns)
        learns = compute_loss is not None
        states = torch.empty(
            1, longest, self.config.hidden_size, dtype=self._dtype, device="meta", requires_grad=learns
        )
        numbers = torch.arange(count)

        scores = {turn: torch.zeros(micro.mask.sum(), device=ranks.device) for turn, micro in enumerate(micro_batches)}
        stages: list[Any] = []
        for part, number in zip(self._parts, range(pipeline.rank, ranks.stages, pipeline.size), strict=True):
            stage = Stage(self, part, turns, longest, temperature, scores)
            received = states if number else numbers[:1]
            sent = (states,) * (len(TokenScores._fields) if number == ranks.stages - 1 else 1)
            stages.append(
                PipelineStage(stage, number, ranks.stages, ranks.device, received, sent, group=pipeline.group)
            )

        errors: list[Any] = []

        def compute_stage_loss(output: tuple[Tensor, Tensor], number: Tensor) -> Tensor:
            try:
                if compute_loss is not None and number < len(micro_batches):
                    return compute_loss(int(number), TokenScores(*output))
            except Exception as error:  # raised below: the other ranks wait for the gradients
                errors.append(error)
            return output[0].sum()

        options: Any = {
            "n_microbatches": count,
            "loss_fn": compute_stage_loss if learns else None,
            "scale_grads": False,
        }
        schedule: Any = (
            Schedule1F1B(stages[0], **options) if len(stages) == 1 else ScheduleInterleaved1F1B(stages, **options)
        )
        schedule.step(
            *([] if pipeline.rank else [numbers]),
            number=numbers,
            target=numbers if pipeline.rank == pipeline.size - 1 and learns else None,
            return_outputs=False,
        )

        first_error = [*errors, None][:1]
        if learns:
            dist.broadcast_object_list(first_error, group=pipeline.group, group_src=pipeline.size - 1)
        if first_error[0] is not None:
            raise first_error[0]
        return [scores[turn] for turn in range(len(micro_batches))]

    def join_stages(self, own_weights: Iterator[tuple[str, Tensor]], meta: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor) of the weights of all stages, given those of this rank's stages in their order.

        Every rank must iterate; with `meta` tensors have no values, and a single rank may.
        """
        for name, (rank, shape) in self._owners.items():
            device = "meta" if meta else self.ranks.device
            tensor = (
                next(own_weights)[1].contiguous()
                if rank == self.ranks.pipeline.rank
                else torch.empty(shape, device=device)
            )
            if not meta:
                dist.broadcast(tensor, group=self.ranks.pipeline.group, group_src=rank)
            yield name, tensor

    def join_groups(self, groups: list[dict[str, Any]]) -> None:
        """Name in each group of an optimiser's state dict the parameters of all stages, in place: as in a checkpoint
        without a pipeline. Every rank must call this."""
        names = [group["params"] for group in groups]
        by_rank = [names] * self.ranks.pipeline.size
        dist.all_gather_object(by_rank, names, group=self.ranks.pipeline.group)
        for group, *parts in zip(groups, *by_rank, strict=True):
            group["params"] = [name for part in parts for name in part]
