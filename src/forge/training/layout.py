"""Into how many parts a trainer's ranks divide a model and its batches. Imports no torch."""

from __future__ import annotations

from math import gcd
from typing import Any

from ..config import Section

FAMILIES = ("llama", "qwen2", "qwen3")  # whose layers tensor parallelism knows


class Parallelism(Section):
    """Degrees whose product is the number of ranks, `services.trainer.procs` (and the critic's)."""

    data_parallel_replicate_degree: int | None = None
    """Copies of the shards (HSDP); null: what the other degrees leave."""
    data_parallel_shard_degree: int = -1
    """Ranks that share one copy of the weights and see different sequences (FSDP2); -1: what the others leave."""
    tensor_parallel_degree: int = 1
    """Ranks that share the heads and feed-forward of each layer, and the tokens between them."""
    context_parallel_degree: int = 1
    """Ranks that share the weights, the tokens of a sequence and, in attention, the heads (Ulysses)."""
    pipeline_parallel_degree: int = 1
    """1: pipelines are not supported."""

    def over(self, ranks: int, who: str | None = None) -> Parallelism:
        """With all degrees known, for so many ranks.

        Args:
            who: the ranks, as an error should call them.

        ValueError: degrees that mean nothing, do not make this number of ranks, or that no trainer has.
        """
        who = who or f"the trainer's {ranks} ranks"
        replicate, shard = self.data_parallel_replicate_degree, self.data_parallel_shard_degree
        if self.pipeline_parallel_degree != 1:
            raise ValueError(
                f"parallelism.pipeline_parallel_degree = {self.pipeline_parallel_degree}: no trainer schedules a "
                "pipeline; set it to 1 and raise data_parallel_shard_degree, tensor_parallel_degree or "
                "context_parallel_degree"
            )
        for name in ("data_parallel_replicate_degree", "tensor_parallel_degree", "context_parallel_degree"):
            if (degree := getattr(self, name)) is not None and degree < 1:
                raise ValueError(f"parallelism.{name} must be at least 1, got {degree}")
        if ranks % (self.tensor_parallel_degree * self.context_parallel_degree):
            raise ValueError(
                f"parallelism: tensor_parallel_degree * context_parallel_degree = {self.tensor_parallel_degree} * "
                f"{self.context_parallel_degree} does not divide {who}"
            )
        rest = ranks // (self.tensor_parallel_degree * self.context_parallel_degree)
        left = "" if rest == ranks else f", of which tensor and context parallelism leave {rest}"
        for name, degree in (("replicate", replicate or 1), ("shard", rest if shard == -1 else shard)):
            if degree < 1 or rest % degree:
                raise ValueError(f"parallelism.data_parallel_{name}_degree = {degree} does not divide {who}{left}")
        if shard == -1:
            shard = rest // (replicate or 1)
        replicate = replicate or rest // shard
        if replicate * shard != rest:
            raise ValueError(
                f"parallelism: data_parallel_replicate_degree * data_parallel_shard_degree = {replicate} * {shard} "
                f"does not make {who}{left}"
            )
        degrees = {"data_parallel_replicate_degree": replicate, "data_parallel_shard_degree": shard}
        return self.model_copy(update=degrees)

    def check(self, config: Any) -> None:
        """Refuse a transformers config that cannot be divided so; names the numbers.

        ValueError: its layers are not known, it has too few heads, or sizes that are no multiple of a degree.
        """
        tensor, context = self.tensor_parallel_degree, self.context_parallel_degree
        family, biased = config.model_type, getattr(config, "attention_bias", False)
        if tensor > 1 and family not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise ValueError(
                f"parallelism.tensor_parallel_degree: {family} models cannot be divided; those of {known} can"
            )
        if tensor > 1 and (getattr(config, "mlp_bias", False) or (biased and family != "qwen2")):
            raise ValueError(
                "parallelism.tensor_parallel_degree: o_proj or down_proj has a bias, which cannot be divided"
            )
        for name, degree, whose in (
            ("num_attention_heads", tensor * context, "tensor_parallel_degree * context_parallel_degree"),
            ("num_key_value_heads", tensor, "tensor_parallel_degree"),
            ("intermediate_size", tensor, "tensor_parallel_degree"),
            ("hidden_size", tensor, "tensor_parallel_degree"),
        ):
            if degree > 1 and getattr(config, name) % degree:
                raise ValueError(
                    f"parallelism: the model's {name} = {getattr(config, name)} is no multiple of {whose} = {degree}"
                )


def copies(heads: int, ranks: int) -> int:
    """How often each of some heads has to be repeated before ranks can have equal numbers of them."""
    return ranks // gcd(heads, ranks)
