"""Models that say one number of a token: a critic of the state before it, or a reward model of all up to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..models import quiet_loading
from ..types import Batch
from .policy import Packed, Policy
from .sequence import whole

Head = Literal["policy", "value", "reward"]

SCORE = "score.weight"


class TokenValues(NamedTuple):
    """What a value or reward head says of the tokens with mask True: [trained], float32."""

    values: Tensor


class Scalar(Packed):
    """A transformers sequence classifier of one class.

    Args:
        lag: how far before a token its number is read: 1 for a critic, whose value of a state must not know what is
            done in it; 0 for a reward model, which transformers reads at a sequence's last token.
    """

    def __init__(self, model: PreTrainedModel, lag: int) -> None:
        super().__init__(model)
        self.lag = lag

    @classmethod
    def from_pretrained(cls, path: str | Path, head: Head, *, gradient_checkpointing: bool = False) -> Scalar:
        """Load float32 weights from a folder or a hub id: of a sequence classifier, or the backbone of a causal
        language model.

        A head that is not there begins at 0 as a critic's, and as a reward model's with variance 1 / (dim + 1)
        (Stiennon et al. 2020), the same on every rank and in every run.

        ValueError: the model is a classifier of several classes, or lacks more than the head.
        """
        classes = AutoConfig.from_pretrained(path)
        if any("SequenceClassification" in name for name in classes.architectures or ()) and classes.num_labels != 1:
            raise ValueError(f"{path} tells {classes.num_labels} classes apart: a {head} model has one number a token")
        with quiet_loading():
            model, found = AutoModelForSequenceClassification.from_pretrained(
                path, num_labels=1, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
        if missing := sorted(found["missing_keys"] - {SCORE}):
            raise ValueError(f"{path} lacks {len(missing)} weights of a {head} model, {missing[0]!r} among them")
        if found["missing_keys"]:
            score = model.get_parameter(SCORE).data
            spread = 0.0 if head == "value" else (score.shape[1] + 1) ** -0.5
            score.copy_(torch.randn(score.shape, generator=torch.Generator().manual_seed(0)) * spread)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return cls(model, lag=1 if head == "value" else 0)

    def forward(self, batch: Batch, temperature: float = 1.0) -> TokenValues:
        """One number for each token with mask True; a temperature means nothing to it."""
        states, own, group = self.states(batch, self.lag)
        # In float32 whatever the backbone computes in: bfloat16 cannot tell 100 from 100.4.
        with torch.autocast(states.device.type, enabled=False):
            score: Any = self.model.score
            values = states.float() @ score.weight.float()[0]
        return TokenValues(*whole((values,), own.counts, group))

    def save(self, folder: Path, weights: dict[str, Tensor], words: PreTrainedTokenizerBase) -> None:
        """As a sequence classifier of one class, which tells the last token of a row by what pads it: transformers
        refuses batches without."""
        config = self.model.config
        if config.pad_token_id is None:
            # Where the tokenizer does not say, what ends a sequence, which a classifier then overlooks there.
            eos = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
            config.pad_token_id = eos if words.pad_token_id is None else words.pad_token_id
        super().save(folder, weights, words)


def load(path: str | Path, head: Head, *, gradient_checkpointing: bool = False) -> Policy | Scalar:
    """The model of a folder or hub id with this head.

    ValueError: no such head, or a model that does not suit it.
    """
    if head == "policy":
        return Policy.from_pretrained(path, gradient_checkpointing=gradient_checkpointing)
    if head not in ("value", "reward"):
        raise ValueError(f"head must be policy, value or reward, got {head!r}")
    return Scalar.from_pretrained(path, head, gradient_checkpointing=gradient_checkpointing)
