"""The policy of any causal language model of transformers: in packs as the core's, or in padded rows."""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from forge.models.architecture import rotary_limit
from forge.training.attention import FILL, NAME, gather_scores
from forge.training.distributed import Ranks, to_device
from forge.training.linear import at_least_float32, scores_of, token_logprobs
from forge.training.policy import Policy, TokenScores, rank_tokens
from forge.types import Batch

from .images import forbid_images, prepare_images


class Traits(NamedTuple):
    """Traits of a model that determine how the trainer computes it.

    attention: "forge_packed", or transformers' attention by which padded rows give what each sequence gives.
    scale: logits are the output embeddings' product times this; None: only the model's own forward pass has them.
    reason: why there is no packed attention; "" with it.
    """

    attention: str
    scale: float | None
    reason: str = ""


class FamilyPolicy(Policy):
    """A causal language model of transformers that scores the tokens of a batch, by its traits."""

    def __init__(self, model: PreTrainedModel, traits: Traits) -> None:
        nn.Module.__init__(self)
        self.traits = traits
        self.adopt(model, self.traits.attention)
        # Dropout that attention gets as a number, as well.
        for module in model.modules():
            for name, value in list(vars(module).items()):
                if "dropout" in name and isinstance(value, float):
                    setattr(module, name, 0.0)

    def forward(self, batch: Batch, temperature: float = 1.0) -> TokenScores:
        """Return log-probability and entropy of each token with mask True, at the sampler's `temperature`."""
        ranks = self.ranks or Ranks(0, 1, next(self.model.parameters()).device, None)
        limit, length = rotary_limit(self.model.config), int(batch.lengths.max())
        if limit is not None and length > limit[0]:
            raise ValueError(
                f"a sequence of {length} tokens is too long: this model's {limit[1]} is supported up to {limit[0]} "
                "tokens"
            )

        if self.traits.attention != NAME:
            return self._score_rows(batch, temperature, ranks)
        local = rank_tokens(batch, 1, ranks)
        inputs = {"input_ids": local.tokens[None], "position_ids": local.positions[None]}
        scores = self._score_states(
            (torch.zeros_like(local.state_indices), local.state_indices),
            local.labels,
            temperature,
            **inputs,
            layout=local.layout,
            context=ranks.context,
        )
        return TokenScores(*gather_scores(scores, local.counts, ranks.sequence, local.order))

    def _score_rows(self, batch: Batch, temperature: float, ranks: Ranks) -> TokenScores:
        """Return the scores by transformers' own attention, over rows of similar length padded on the right."""
        starts = np.cumsum(batch.lengths) - batch.lengths
        targets = batch.tokens if batch.targets is None else batch.targets
        # Each rank makes as many forward passes as the others, which sharded weights ask for.
        scores, indices = [], []
        for rows in split_rows(batch.lengths, FILL if ranks.mesh is None else 0.0):
            lengths = batch.lengths[rows, None]
            column = np.arange(lengths.max())
            is_real = column < lengths
            index = starts[rows, None] + np.minimum(column, lengths - 1)
            row, position = np.nonzero(batch.mask[index] & is_real)
            trained = index[row, position]
            columns = {
                "input_ids": torch.from_numpy(batch.tokens[index]),
                "attention_mask": torch.from_numpy(is_real.astype(np.int64)),
                "row": torch.from_numpy(row),
                "position": torch.from_numpy(position - 1),  # of the state that predicts the token
                "labels": torch.from_numpy(targets[trained]),
            }
            inputs = to_device(columns, ranks.device)
            if batch.images is not None:
                inputs |= prepare_images(self.model, batch.images[rows].tolist(), inputs["input_ids"])
            where = inputs.pop("row"), inputs.pop("position")
            scores.append(self._score_states(where, inputs.pop("labels"), temperature, **inputs))
            indices.append(trained)

        order = torch.from_numpy(np.argsort(np.concatenate(indices))).to(ranks.device)
        logprobs, entropy = (torch.cat(parts)[order] for parts in zip(*scores, strict=True))
        return TokenScores(logprobs, entropy)

    def _score_states(
        self, where: tuple[Tensor, Tensor], labels: Tensor, temperature: float, **inputs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of labels and entropies at the rows and positions `where` of a forward pass."""
        model: Any = self.model
        if self.traits.scale is not None:
            states = model.base_model(use_cache=False, **inputs).last_hidden_state[where]
            weight = model.get_output_embeddings().weight
            return token_logprobs(states, weight, labels, temperature=temperature / self.traits.scale)
        logits = forbid_images(at_least_float32(model(use_cache=False, **inputs).logits[where]), model.config)
        logprobs, _, entropy = scores_of(logits, labels, temperature)
        return logprobs, entropy

    def save_config(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the configuration files as `PackedModel.save_config`, and those of a processor of images."""
        super().save_config(folder, tokenizer)
        for file in Path(self.model.config.name_or_path).glob("*processor_config.json"):
            shutil.copy(file, folder / file.name)

    def plain_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the (name, tensor) pairs as checkpoints on the hub have them, where transformers converts those.

        Buffers that checkpoints have, such as the biases of routers that training leaves as they are, come as well.
        """
        tensors = dict(named_tensors)
        parameter_names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)} | tensors.keys()
        tensors |= {name: tensor for name, tensor in self.model.state_dict().items() if name not in parameter_names}
        yield from revert_weight_conversion(self.model, tensors).items()


def split_rows(lengths: np.ndarray, fill: float) -> Iterator[np.ndarray]:
    """Yield the numbers of sequences of similar length, the longest first.

    Args:
        lengths: [sequences].
        fill: a group's shortest sequence has at least this share of its longest one's tokens.

    >>> [rows.tolist() for rows in split_rows(np.array([8, 3, 7, 2]), fill=0.75)]
    [[0, 2], [1], [3]]
    """
    order = np.argsort(-lengths, kind="stable")
    while len(order):
        count = int((lengths[order] >= fill * lengths[order[0]]).sum())
        yield order[:count]
        order = order[count:]
