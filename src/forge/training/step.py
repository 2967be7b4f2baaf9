"""The parts of a training step: mini-batches, the tensors a loss asks for, scoring under fixed weights, metrics."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..algorithms import Algorithm
from ..algorithms.terms import importance_ratio, kl_k3
from ..types import Batch
from .distributed import Ranks, to_device
from .policy import TokenScores, TokenValues

A = TypeVar("A")
Loss = Callable[..., Tensor]
Inputs = dict[str, Any]  # tensors by the names of a loss's parameters; None for those that a batch does not have


def mini_batches(batch: Batch, parts: int, seed: tuple[int, ...]) -> Iterator[Batch]:
    """Yield `parts` random mini-batches of a batch, each of about the same number of units; with the same seed the same
    on all ranks.

    A unit is the group of a prompt, whose prompt is then computed once, or an episode (or a pair) where there are fewer
    groups than parts. Weights are scaled by the batch's number of units over the mini-batch's, so that the loss of a
    mini-batch estimates the batch's. Mini-batches that are empty or of weight 0 are skipped: momentum and weight decay
    would move the parameters without a gradient.

    Raises:
        ValueError: all weights of the batch are 0.
    """
    if parts == 1:
        yield batch
        return
    if not batch.weights.any():
        raise ValueError("the batch has no token to train: at least one loss weight must be above 0")

    # The unit of each sequence.
    units = np.arange(len(batch)) // batch.unit
    if batch.episodes is not None:
        units = np.unique(batch.episodes, return_inverse=True)[1]
    if batch.groups is not None and len(groups := np.unique(batch.groups)) >= parts:
        units = np.searchsorted(groups, batch.groups)
    order = np.random.default_rng(seed).permutation(units.max() + 1)

    for drawn_units in np.array_split(order, parts):
        if not len(drawn_units):
            continue
        # In the batch's order, so that the packing does not depend on the order in which units were drawn.
        mini_batch = batch.select(np.flatnonzero(np.isin(units, drawn_units)))
        if mini_batch.weights.any():
            yield replace(mini_batch, weights=mini_batch.weights * np.float32(len(order) / len(drawn_units)))


def loss_inputs(micro: Batch, output: TokenScores | TokenValues) -> Inputs:
    """Return the tensors that a loss may have as parameters, each [trained] (tokens with mask True), or None."""
    sequences = np.repeat(np.arange(len(micro)), micro.lengths)
    arrays: dict[str, np.ndarray | None] = {
        "ref_logprobs": micro.ref_logprobs,
        "old_values": micro.values,
        "returns": micro.returns,
        "advantages": micro.advantages,
        "weights": micro.weights,
        "sequences": sequences,
        "tokens": micro.tokens,
        "positions": trained_positions(micro.mask, sequences),
        "groups": None if micro.groups is None else np.repeat(micro.groups, micro.lengths),
        "branch_shares": None if micro.branch_shares is None else np.repeat(micro.branch_shares, micro.lengths),
        "behaviour_logprobs": micro.logprobs,
        "proximal_logprobs": micro.proximal_logprobs,
    }
    columns = {name: torch.from_numpy(array[micro.mask]) for name, array in arrays.items() if array is not None}
    inputs: Inputs = {
        **output._asdict(),
        **dict.fromkeys(arrays),  # None for what the batch does not have
        **to_device(columns, output[0].device),
        "padding_mask": torch.ones_like(output[0]),
    }
    behaviour = inputs.pop("behaviour_logprobs")
    proximal = inputs.pop("proximal_logprobs")

    # Without proximal log-probabilities the policy of this forward pass is the proximal one.
    if isinstance(output, TokenScores):
        proximal = output.logprobs.detach() if proximal is None else proximal
        # NaN: the sampler of this token is unknown.
        inputs["behaviour_logprobs"] = torch.where(behaviour.isnan(), proximal, behaviour)
        inputs["proximal_logprobs"] = proximal

    return inputs


def trained_positions(mask: np.ndarray, sequences: np.ndarray) -> np.ndarray:
    """Return for each token how many trained tokens of the same sequence come before it, [tokens].

    >>> mask = np.array([False, True, True, True])
    >>> trained_positions(mask, sequences=np.array([0, 0, 0, 1])).tolist()
    [0, 0, 1, 0]
    """
    trained_before = np.cumsum(mask) - mask  # in the whole batch
    first_tokens = np.searchsorted(sequences, np.unique(sequences))
    return trained_before - np.repeat(trained_before[first_tokens], np.diff([*first_tokens, len(mask)]))


def parameters_of(loss: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a loss by name, without *args and **kwargs, and those that its `token_loss` adds."""
    parameters = inspect.signature(getattr(loss, "forward", loss)).parameters
    named = {n: p for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if len(named) == len(parameters) or not isinstance(loss, Algorithm):
        return named
    return named | {n: inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in loss.further if n not in named}


def call_by_name(loss: Callable[..., A], inputs: Inputs) -> A:
    """Return the result of `loss`, called with the tensors that its parameters name.

    Raises:
        ValueError: a required tensor is missing; the message names it.
    """
    arguments = {}
    for name, parameter in parameters_of(loss).items():
        if inputs.get(name) is not None:
            arguments[name] = inputs[name]
        elif parameter.default is not inspect.Parameter.empty:
            continue
        elif name == "ref_logprobs" and not getattr(loss, "beta", 0) and "behaviour_logprobs" in inputs:
            # Older losses require ref_logprobs; without a KL term (beta 0) they take the ratio to it.
            arguments[name] = inputs["behaviour_logprobs"]
        else:
            present = ", ".join(sorted(key for key, tensor in inputs.items() if tensor is not None))
            loss_name = getattr(loss, "__name__", type(loss).__name__)
            raise ValueError(f"{loss_name} needs {name!r}, which the batch does not have; it has {present}")
    return loss(**arguments)


def micro_batch_loss(loss: Loss, micro: Batch, inputs: Inputs, output: TokenScores | TokenValues) -> Tensor:
    """Return the micro-batch's share of the batch's loss, a scalar.

    A loss without a `weights` parameter averages by itself: it gets right-padded tensors [sequences, width], and its
    value is scaled by the sum of the micro-batch's weights. That is exact if its mean is the batch's aggregation and no
    episode has branches in two micro-batches.
    """
    if "weights" in parameters_of(loss):
        return call_by_name(loss, inputs)
    if not len(output[0]):
        return output[0].sum()

    counts = micro.trained_counts().tolist()
    padded = {
        name: None if values is None else pad_sequence(values.split(counts), batch_first=True)
        for name, values in inputs.items()
        if name != "sequences"
    }
    return call_by_name(loss, padded) * inputs["weights"].sum()


@torch.no_grad()
def score_tokens(
    forward: Callable[[list[Batch]], Iterable[Tensor]], batch: Batch, *, max_tokens: int, ranks: Ranks | None = None
) -> np.ndarray:
    """Return one number per token with mask True, 0 elsewhere; [tokens], float32.

    Args:
        forward: returns for each micro-batch the numbers of its tokens with mask True, [trained].
        max_tokens: maximum tokens of a forward pass, unless a single sequence has more.
        ranks: they divide the work; every rank must call this with the same batch and gets the whole result.
    """
    rank, world_size = (ranks.data.rank, ranks.data.size) if ranks is not None else (0, 1)

    # Micro-batches so small that every rank has one, in a pipeline one for each group of ranks.
    min_count = world_size * (ranks.pipeline.size if ranks is not None else 1)
    max_tokens = min(max_tokens, math.ceil(len(batch.tokens) / min_count))
    runs: list[list[int]] = [[]]  # neighbouring sequences that fit into one forward pass
    run_tokens = 0
    for sequence, length in enumerate(batch.lengths.tolist()):
        if runs[-1] and run_tokens + length > max_tokens:
            runs.append([])
            run_tokens = 0
        runs[-1].append(sequence)
        run_tokens += length

    # A rank without a run repeats the last one: every rank takes part in every collective.
    own_runs = [runs[min(turn + rank, len(runs) - 1)] for turn in range(0, len(runs), world_size)]
    micro_batches = [batch.select(np.array(run)) for run in own_runs]
    starts = np.concatenate([[0], np.cumsum(batch.lengths)])
    scores = np.zeros(len(batch.tokens), dtype=np.float32)
    for turn, (micro, micro_scores) in enumerate(zip(micro_batches, forward(micro_batches), strict=True)):
        if turn * world_size + rank < len(runs):
            run = own_runs[turn]
            tokens_of_run = scores[starts[run[0]] : starts[run[-1] + 1]]  # a view
            tokens_of_run[micro.mask] = micro_scores.float().cpu().numpy()

    # The other ranks' tokens are 0 here, so that a sum has the numbers of all.
    if ranks is None or ranks.results.group is None:
        return scores
    return ranks.sum(torch.from_numpy(scores).to(ranks.device)).cpu().numpy()


def evaluate_pairs(loss: Loss, batch: Batch, **outputs: np.ndarray) -> dict[str, float]:
    """Return `eval/loss` of held-out pairs, and the mean of each metric of the loss as `eval/<name>`.

    Args:
        loss: one with `metrics`, such as `forge.losses.DPOLoss` or `forge.losses.BradleyTerryLoss`.
        batch: the pairs, packed as for training; with `ref_logprobs` if the loss takes them.
        outputs: the trainer's scores, [tokens], by the loss's name for them: `logprobs`, or a reward model's `values`.

    Raises:
        ValueError: a tensor that the loss requires is missing.
    """
    arrays = {
        "weights": batch.weights,
        "sequences": np.repeat(np.arange(len(batch)), batch.lengths),
        "ref_logprobs": batch.ref_logprobs,
        **outputs,
    }
    inputs = {name: None if array is None else torch.from_numpy(array[batch.mask]) for name, array in arrays.items()}
    metrics = call_by_name(loss.metrics, inputs)  # type: ignore[attr-defined]
    means = {f"eval/{name}": float(values.double().mean()) for name, values in metrics.items()}
    return {"eval/loss": float(call_by_name(loss, inputs)), **means}


def token_losses(loss: Loss, inputs: Inputs) -> Tensor:
    """Return each token's part of `loss`, [trained]; NaN if the loss has no parameter `weights`.

    The parts add up to a loss that is linear in `weights`, as all of this library's are.
    """
    token_weights = inputs["weights"]
    if "weights" not in parameters_of(loss) or not len(token_weights):
        return torch.full_like(token_weights, math.nan)

    # The gradient with respect to a token's weight is the token's loss before weighting.
    weights = token_weights.detach().requires_grad_()
    fixed = {name: None if values is None else values.detach() for name, values in inputs.items()}
    with torch.enable_grad():
        value = call_by_name(loss, fixed | {"weights": weights})
    return torch.autograd.grad(value, weights)[0] * token_weights


class TokenRecord:
    """Recorded values of single tokens in a step, for the tokens that a batch numbers in `recorded`, over all ranks.

    By name: `logprobs` and `ratio` (to the policy that sampled) in the first epoch; `entropy`, `clip_fraction` and
    `correction_fraction`, means over epochs; `loss`, the token's part of the step's loss. NaN: the token was not
    trained, or the loss has no such number.
    """

    ONCE = ("logprobs", "ratio")  # recorded in the first epoch only
    MEANS = ("entropy", "clip_fraction", "correction_fraction")

    def __init__(self, batch: Batch, device: torch.device) -> None:
        size = int(batch.recorded.max(initial=-1)) + 1  # type: ignore[union-attr]
        self._sums = {name: torch.zeros(size, device=device) for name in (*self.ONCE, *self.MEANS, "loss", "times")}

    def add(self, micro: Batch, loss: Loss, inputs: Inputs, *, first_epoch: bool) -> None:
        """Add the recorded tokens of a micro-batch of this rank; `inputs` are the loss's."""
        record_index = micro.recorded[micro.mask]  # type: ignore[index]  # -1: not recorded
        recorded = np.flatnonzero(record_index >= 0)
        if not len(recorded):
            return

        # Indices of the recorded tokens: in the micro-batch, and in the record.
        columns = {"source": torch.from_numpy(recorded), "target": torch.from_numpy(record_index[recorded])}
        logprobs = inputs["logprobs"]
        source, target = to_device(columns, logprobs.device).values()

        with torch.no_grad():
            values = call_by_name(loss.metrics, inputs) if hasattr(loss, "metrics") else {}
            values |= {"entropy": inputs["entropy"], "loss": token_losses(loss, inputs)}
            if first_epoch:
                values |= {"logprobs": logprobs, "ratio": importance_ratio(logprobs, inputs["behaviour_logprobs"])}
            values["times"] = torch.ones_like(logprobs)

            missing = torch.full_like(logprobs, math.nan)
            names = self._sums.keys() if first_epoch else self._sums.keys() - {*self.ONCE}
            for name in names:
                self._sums[name][target] += values.get(name, missing).detach().float()[source]

    def reduce(self, ranks: Ranks, updates: int) -> dict[str, np.ndarray]:
        """Return the recorded values by name, [recorded tokens] each, after a step of `updates` optimiser updates.
        Every rank must call this."""
        record = dict(zip(self._sums, ranks.sum(torch.stack(list(self._sums.values()))).cpu().numpy(), strict=True))
        times = record.pop("times")
        for name in self.MEANS:
            record[name] /= np.maximum(times, 1)
        record["loss"] /= updates
        return {name: np.where(times > 0, values, np.float32(np.nan)) for name, values in record.items()}


@dataclass
class Metrics:
    """Means and maxima of a step by name, over the tokens of all ranks; accumulated in float64 on the device."""

    _sums: dict[str, Tensor] = field(default_factory=dict)  # [2]: the sum, the number of terms
    _maxima: dict[str, Tensor] = field(default_factory=dict)
    load: Tensor = field(default_factory=lambda: torch.zeros(()))  # of experts, see `experts.load_metrics`

    def add(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Add every element of `values`, or those with mask True, to the mean of this name."""
        # A mask, not an index: the number of its elements would have to come back from the device.
        terms = values.detach() if mask is None else values.detach().where(mask, 0.0)
        total = terms.double().sum()
        count = torch.full_like(total, values.numel()) if mask is None else mask.sum(dtype=torch.float64)
        term = torch.stack([total, count])
        self._sums[name] = self._sums[name] + term if name in self._sums else term

    @torch.no_grad()
    def add_micro_batch(
        self,
        loss: Loss,
        inputs: Inputs,
        current: Tensor | None,
        current_sequences: Tensor | None,
        *,
        first_epoch: bool,
        scored_at_start: bool,
    ) -> None:
        """Add what `loss.metrics` returns, if it exists, and the standard metrics of `PolicyTrainer.train_step`.

        Args:
            current: [trained] bool, tokens sampled by the version in training; None if the model is not a policy.
            current_sequences: [trained] bool, tokens of sequences that this version sampled from beginning to end.
            scored_at_start: whether `proximal_logprobs` are of the weights before the step's first update: on tokens of
                that version their distance to the sampler's is the difference between trainer and engine.
        """
        if hasattr(loss, "metrics"):
            for name, values in call_by_name(loss.metrics, inputs).items():
                self.add(name, values)
        if current is None or current_sequences is None:
            return

        names = ("logprobs", "proximal_logprobs", "behaviour_logprobs", "entropy", "ref_logprobs")
        logprobs, proximal, behaviour, entropy, ref = (inputs[name] for name in names)
        self.add("entropy", entropy)
        if ref is not None:
            self.add("kl", kl_k3(logprobs, ref))

        # Later epochs compare weights that the step itself changed.
        if not first_epoch:
            return

        ratio = importance_ratio(logprobs, behaviour)
        deviation = (ratio - 1.0).abs()
        self.add("ratio", ratio)
        self.add("ratio_deviation", deviation)
        largest = deviation.double().max() if len(ratio) else torch.zeros_like(ratio, dtype=torch.float64).sum()
        self._maxima["ratio_max_deviation"] = torch.maximum(self._maxima.get("ratio_max_deviation", largest), largest)

        self.add("on_policy", current)
        if scored_at_start:
            difference = (proximal - behaviour).abs()
            self.add("engine_difference", difference, current & current_sequences)
            # Their context was computed under older weights, and the engine may have kept its keys and values.
            self.add("engine_difference_across_updates", difference, current & ~current_sequences)

    def reduce(self, ranks: Ranks) -> dict[str, float]:
        """Return means and maxima over all ranks by name; every rank must call this. Means over no value are omitted.
        The attribute `load` is in host memory afterwards."""
        mean_names, max_names = sorted(self._sums), sorted(self._maxima)
        if ranks.results.group is not None:
            # Names may differ, as a rank may have had no token: agree on them first.
            by_rank: list[tuple[list[str], list[str]]] = [([], [])] * ranks.results.size
            dist.all_gather_object(by_rank, (mean_names, max_names), group=ranks.results.group)
            mean_names = sorted({name for names, _ in by_rank for name in names})
            max_names = sorted({name for _, names in by_rank for name in names})

        zero = torch.zeros((), dtype=torch.float64, device=ranks.device)  # of a missing name; no maximum is negative
        empty = zero[None][:0]
        maxima = torch.stack([self._maxima.get(name, zero) for name in max_names]) if max_names else empty
        if ranks.results.group is not None and max_names:
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=ranks.results.group)
        own_sums = [self._sums.get(name, zero.expand(2)) for name in mean_names]  # of values, and their number
        sums = ranks.sum(torch.cat(own_sums)) if mean_names else empty

        # All of them in one copy, for which the host waits for the device.
        load = self.load.flatten() if self.load.dim() else empty
        sizes = [len(sums), len(maxima), len(load)]
        host_sums, host_maxima, host_load = torch.cat([sums, maxima, load]).cpu().split(sizes)
        if self.load.dim():
            self.load = host_load.view(self.load.shape)

        pairs = zip(mean_names, host_sums.view(-1, 2).tolist(), strict=True)
        means = {name: total / count for name, (total, count) in pairs if count}
        return means | dict(zip(max_names, host_maxima.tolist(), strict=True))
