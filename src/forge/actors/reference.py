"""The frozen reference model that the policy is kept close to."""

from __future__ import annotations

import numpy as np

from ..controller import ForgeActor, endpoint
from ..observability import phase
from ..types import Batch


class ReferenceModel(ForgeActor):
    """Scores batches under the weights that training started from.

    Args:
        model: Hugging Face folder or hub id.
        seq_len: most tokens in one forward pass.
        temperature: that of the sampler, as in the trainer.
        dtype: "float32" or "bfloat16".
    """

    def __init__(self, model: str, *, seq_len: int = 4096, temperature: float = 1.0, dtype: str = "float32") -> None:
        self.model, self.seq_len, self.temperature, self.dtype = model, seq_len, temperature, dtype

    def setup(self) -> None:
        from ..training.distributed import join
        from ..training.policy import Policy, resolve_dtype

        if self.context.world_size != 1:
            raise ValueError("a reference model is one process: scale it with num_replicas instead of procs")
        self.device = join(self.context.replica).device  # several may see the devices of all
        self.policy = Policy.from_pretrained(self.model).to(self.device, resolve_dtype(self.dtype, self.device)).eval()

    @endpoint
    def logprobs(self, batch: Batch) -> np.ndarray:
        """Log-probabilities of the batch's trained tokens, [tokens], 0 elsewhere."""
        from ..training.scoring import score

        with phase("reference"):
            return score(lambda part: self.policy(part, self.temperature).logprobs, batch, max_tokens=self.seq_len)
