"""What a step reports: means and maxima over its tokens, whichever rank they were on."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..algorithms.terms import importance_ratio, kl_k3
from .distributed import Ranks
from .named import Loss, Named, call_by_name


class Tally:
    """Sums in float64 with the number of their terms, and maxima, by name."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}  # [2]: the sum, the number of terms
        self._most: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor) -> None:
        """Every element of `values` counts for the mean of this name."""
        total = values.detach().double().sum()
        both = torch.stack([total, torch.full_like(total, values.numel())])
        self._sums[name] = self._sums[name] + both if name in self._sums else both

    def most(self, name: str, values: Tensor) -> None:
        """Every element of `values`, none of them negative, counts for the maximum of this name."""
        largest = values.detach().double().max() if len(values) else torch.zeros_like(values, dtype=torch.float64).sum()
        self._most[name] = torch.maximum(self._most.get(name, largest), largest)

    def reduce(self, ranks: Ranks) -> dict[str, float]:
        """By name, over all ranks and equal on all of them; every rank must call it. A mean of nothing is left out."""
        return self._means(ranks) | self._maxima(ranks)

    def _means(self, ranks: Ranks) -> dict[str, float]:
        nothing = torch.zeros(2, dtype=torch.float64, device=ranks.device)
        if not (names := _of_all(ranks, self._sums)):
            return {}
        summed = ranks.sum(torch.stack([self._sums.get(name, nothing) for name in names])).tolist()
        return {name: total / count for name, (total, count) in zip(names, summed, strict=True) if count}

    def _maxima(self, ranks: Ranks) -> dict[str, float]:
        nothing = torch.zeros((), dtype=torch.float64, device=ranks.device)
        if not (names := _of_all(ranks, self._most)):
            return {}
        largest = torch.stack([self._most.get(name, nothing) for name in names])
        if ranks.data.group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=ranks.data.group)
        return dict(zip(names, largest.tolist(), strict=True))


def _of_all(ranks: Ranks, own: dict[str, Tensor]) -> list[str]:
    """The names that any rank has: what a loss reports may depend on what it is given, and a rank may have nothing."""
    if ranks.data.group is None:
        return sorted(own)
    by_rank: list[list[str]] = [[]] * ranks.data.size
    dist.all_gather_object(by_rank, sorted(own), group=ranks.data.group)
    return sorted({name for names in by_rank for name in names})


@torch.no_grad()
def reported(tally: Tally, loss: Loss, named: Named) -> None:
    """What the loss itself reports, if it does."""
    if hasattr(loss, "metrics"):
        for name, values in call_by_name(loss.metrics, named).items():
            tally.add(name, values)


@torch.no_grad()
def of_policy(tally: Tally, named: Named, current: Tensor, *, first_epoch: bool, scored_at_start: bool) -> None:
    """The standard diagnostics of a policy, see `PolicyTrainer.train_step`.

    Args:
        current: [trained], the tokens that were sampled by the version that trains.
        scored_at_start: the proximal policy is known: its distance to the sampler is that of trainer and engine.
    """
    logprobs, proximal, behaviour, entropy, ref = (
        named[name] for name in ("logprobs", "proximal_logprobs", "behaviour_logprobs", "entropy", "ref_logprobs")
    )
    assert logprobs is not None and proximal is not None and behaviour is not None and entropy is not None
    tally.add("entropy", entropy)
    if ref is not None:
        tally.add("kl", kl_k3(logprobs, ref))
    if not first_epoch:
        return
    ratio = importance_ratio(logprobs, behaviour)
    tally.add("ratio", ratio)
    tally.add("ratio_deviation", (ratio - 1.0).abs())
    tally.most("ratio_max_deviation", (ratio - 1.0).abs())
    tally.add("on_policy", current)
    if scored_at_start:
        tally.add("engine_difference", (proximal - behaviour)[current].abs())
