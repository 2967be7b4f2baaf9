"""The frozen reference model that the policy is kept close to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..controller import ForgeActor, Options, endpoint
from ..observability import phase
from ..training.settings import PassSettings
from ..types import Batch


class ReferenceModel(ForgeActor):
    """Scores batches under the weights that training started from.

    Args:
        model: Hugging Face folder or hub id.
        temperature: that of the sampler, as in the trainer.
        settings: `seq_len` and `dtype` of `forge.training.settings.PassSettings`.
    """

    def __init__(self, model: str, *, temperature: float = 1.0, **settings: Any) -> None:
        self.model, self.temperature, self.passes = model, temperature, PassSettings(**settings)

    @classmethod
    def place(cls, options: Options, kwargs: dict[str, Any]) -> tuple[Options, dict[str, Any]]:
        if options.procs != 1:
            raise ValueError("a reference model is one process: scale it with num_replicas instead of procs")
        return options, kwargs

    def setup(self) -> None:
        from ..training.distributed import join
        from ..training.policy import Policy, resolve_dtype

        self.device = join(self.context.replica).device  # several may see the devices of all
        dtype = resolve_dtype(self.passes.dtype, self.device)
        self.policy = Policy.from_pretrained(self.model).to(self.device, dtype).eval()

    @endpoint
    def logprobs(self, batch: Batch) -> np.ndarray:
        """Log-probabilities of the batch's trained tokens, [tokens], 0 elsewhere."""
        from ..training.step import score

        with phase("reference"):
            length = self.passes.seq_len
            batch = replace(batch, experts=None)  # those of another model
            return score(lambda part: self.policy(part, self.temperature).logprobs, batch, max_tokens=length)
