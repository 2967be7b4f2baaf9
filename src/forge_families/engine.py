"""The embedded engine for models of transformers' own modules: opened from a folder, and checked before a run.

Attention and cache are the engine's, all else is theirs.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from forge.engines.cache import BLOCK, KeyValueCache, round_up
from forge.engines.decoder import QUERIES, Decoder
from forge.models.architecture import FAMILIES
from forge.models.exact import attention_granule, embedding_bag_indices
from forge.models.find import quiet_loading
from forge.models.tokenizer import has_images

from .attention import UnsupportedModel, run_model
from .probe import build_small_model, first_words, recall_answer
from .samples import SampleDecoder
from .states import RowStates, StateCache
from .weights import AttentionTemplate, ModuleWeights, Template, read_model

# The most that log-probabilities may differ from those of transformers' forward pass, for large random weights.
MAX_DIFFERENCE = 1e-3
STEPS, LENGTHS, PIECE = 12, (48, 27), 20  # compared decode steps, tokens of each sequence, of the first prefill


class ModuleDecoder(Decoder):
    """A `Decoder` of any causal model of transformers whose attention goes through transformers' interface.

    Heads of layers that have fewer or smaller ones than others are repeated and padded. With recurrent layers each
    prompt is computed separately, and a row's bits depend on the other rows.
    """

    weights: ModuleWeights  # type: ignore[assignment]

    def __init__(
        self,
        template: AttentionTemplate,
        config: PreTrainedConfig,
        weights: ModuleWeights,
        rows: int,
        max_seq_len: int,
        dtype: torch.dtype,
        device: torch.device,
        record: bool = False,
        cache_bytes: int | None = None,
        granule: int = 16,
    ):
        longest = getattr(config, "max_position_embeddings", None)
        if template.offset and longest and max_seq_len > longest - template.offset:
            raise ValueError(
                f"this model's positions start at {template.offset}: set generator.max_seq_len to at most "
                f"{longest - template.offset}"
            )
        self.weights = weights
        self.device = device
        self.template = template
        self.vocab = template.vocab
        calls = template.calls
        self.K = max((call.kv_heads for call in calls), default=1)
        self.D = max((call.size for call in calls), default=1)
        if device.type == "cpu" and dtype == torch.float32:
            shapes = {(call.heads // self.K, self.D, call.scale, round_up(max_seq_len, BLOCK)) for call in calls}
            granule = max((attention_granule(*shape) for shape in shapes), default=granule)
        self.granule = granule
        shape = {"num_hidden_layers": max(len(calls), 1), "num_key_value_heads": self.K, "head_dim": self.D}
        options: dict[str, Any] = {"rows": rows, "max_seq_len": max_seq_len, "dtype": dtype, "device": device}
        options |= {
            "config": SimpleNamespace(model_type=FAMILIES[0], **shape),
            "limit": cache_bytes,
            "granule": granule,
        }
        self.has_prefixes = not template.states
        self.cache = KeyValueCache(**options) if self.has_prefixes else StateCache(template.states, **options)

        windows = sorted({call.window or 0 for call in calls})
        self.kinds = [(None, window or None) for window in windows]  # type: ignore[misc]
        self.kind_of = [windows.index(call.window or 0) for call in calls]
        self.row_ids = torch.arange(rows, device=device)
        self.cache_positions = torch.arange(self.cache.longest, device=device)
        self.queries = QUERIES if device.type == "cpu" else None

    def decode(self, tokens: Tensor, positions: Tensor, length: int) -> Tensor:
        """Run one token of each of the first B rows, as `Decoder.decode`."""
        rows = len(tokens)
        cache = self.cache
        self.length = length
        self.index = cache.index(self.row_ids[:rows], positions)
        self.biases = self._biases_at(positions, length)
        stores = cache.keys, cache.values
        self.keys, self.values = (store.flatten(1, 2)[:, : rows * self.K, :length].unbind() for store in stores)
        states = None
        if isinstance(cache, StateCache):
            states = RowStates(self.template.config, cache.views(0, rows))
            for state in filter(lambda state: state is not None, states.read()):
                state[positions == 0] = 0  # the row of a prompt of one token has the states of an earlier sample
        output = self._run(self._attend_step, self.weights.model, tokens[:, None], positions[:, None], states)
        return output.logits[:, -1].float()  # type: ignore[no-any-return]

    def prefill(
        self, prompts: Sequence[Sequence[int]], rows: Sequence[int], starts: Sequence[int] = (), images: Any = ()
    ) -> None:
        """Write keys, values and states of each prompt into its row of the cache, as `Decoder.prefill`."""
        cache = self.cache
        if not isinstance(cache, StateCache):
            self._prefill(prompts, rows, starts)
            return
        for prompt, row, start in zip(prompts, rows, starts or [0] * len(prompts), strict=True):
            size = len(prompt) if self.template.continues or not start else 1
            for first in range(0, len(prompt), size):
                states = RowStates(self.template.config, cache.views(row) if start + first else None)
                self._prefill([prompt[first : first + size]], [row], [start + first], states)
                cache.store(row, states.read())

    def _prefill(
        self,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[int],
        starts: Sequence[int],
        states: RowStates | None = None,
    ) -> None:
        tokens, positions, token_rows, self.index, self.blocks = self._plan_prompts(prompts, rows, starts)
        self.real = len(token_rows)
        if states is not None:  # padding would change them
            tokens, positions = tokens[: self.real], positions[: self.real]
        self._run(self._attend_prompts, self.weights.model.base_model, tokens[None], positions[None], states)

    def _run(self, attend: Any, module: nn.Module, tokens: Tensor, positions: Tensor, states: RowStates | None) -> Any:
        self.slots = iter(range(len(self.kind_of)))
        self.tables = self.cache.tables()
        return run_model(partial(self._attend, attend), module, tokens, positions + self.template.offset, states)

    def _attend(
        self,
        attend: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: Any = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Compute the next call of attention of a forward pass, with heads of the cache's number and size."""
        size = value.shape[3]
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        query, key, value = (F.pad(x, (0, self.D - x.shape[3])) for x in (query, key, value))
        if key.shape[1] < self.K:
            key, value = (x.repeat_interleave(self.K // x.shape[1], 1) for x in (key, value))
        return attend(next(self.slots), query, key, value, scale, softcap, s_aux)[..., :size]  # type: ignore[no-any-return]

    def _attend_prompts(
        self, slot: int, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: Any, sinks: Any
    ) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        self.cache.write(self.tables[slot], self.index, k[: self.real], v[: self.real])
        attend = partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=True)
        if softcap is not None or sinks is not None:
            attend = partial(attend_capped, scale=scale, softcap=softcap, sinks=sinks)
        return self._attend_blocks(self.blocks, slot, self.kind_of[slot], q, attend)[None]

    def _attend_step(
        self, slot: int, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: Any, sinks: Any
    ) -> Tensor:
        rows = len(query)
        self.cache.write(self.tables[slot], self.index, key[:, :, 0], value[:, :, 0])
        q = query.reshape(rows * self.K, -1, self.D)
        bias = self.biases[self.kind_of[slot]]
        if softcap is None and sinks is None:
            probs = torch.baddbmm(bias, q, self.keys[slot].transpose(1, 2), alpha=scale).softmax(-1)
        else:
            by_row = None if sinks is None else sinks.view(self.K, -1, 1).repeat(rows, 1, 1)
            probs = capped_probabilities(q, self.keys[slot], bias, scale, softcap, by_row)
        if self.device.type == "cpu":
            bag_indices = embedding_bag_indices(rows * self.K, q.shape[1], self.length, self.cache.length)
            weights = probs.reshape(-1)
            attended = torch.embedding_bag(self.tables[slot][1], *bag_indices, mode=0, per_sample_weights=weights)[0]
        else:
            attended = torch.bmm(probs, self.values[slot])
        return attended.view(rows, 1, -1, self.D)


def attend_capped(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    attn_mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention (P, H, N, D) of queries (P, H, N, D), keys and values (P, K, T, D), as `capped_probabilities`.

    Args:
        attn_mask: (N, T), added to the scores.
        sinks: (H,), of each head.
    """
    keys, values = (x.repeat_interleave(queries.shape[1] // x.shape[1], 1) for x in (keys, values))
    by_head = None if sinks is None else sinks.view(-1, 1, 1)
    return capped_probabilities(queries, keys, attn_mask, scale, softcap, by_head) @ values


def capped_probabilities(
    queries: Tensor, keys: Tensor, bias: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Return the probabilities (..., N, T) of queries (..., N, D) for keys (..., T, D).

    Args:
        bias: added to the scores, after they are capped at +-`softcap`.
        sinks: a further score of each query, whose probability is left out.
    """
    scores = queries @ keys.transpose(-1, -2) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores + bias
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., : keys.shape[-2]]


Opened = tuple[Callable[..., ModuleWeights], Callable[..., Decoder], Iterator[tuple[str, Tensor]]]


class Tier(NamedTuple):
    """Way in which the engine computes transformers models: a template of their weights, and a decoder."""

    name: str
    template: Callable[[PreTrainedModel, torch.device], Any]
    decoder: Callable[..., Decoder]


# The fastest one first.
TIERS = (
    Tier("modules", AttentionTemplate, ModuleDecoder),
    Tier("cached", Template, SampleDecoder),
    Tier("whole", Template, partial(SampleDecoder, has_cache=False)),
)


def open_model(folder: Path, dtype: torch.dtype, device: torch.device) -> Opened:
    """Return factories of a model's weights and decoder, as the core's classes, and the (name, tensor) of each weight
    in its folder.

    Raises:
        ValueError: a weight is missing, or a feature that the engine does not compute.
    """
    model = read_model(folder, dtype)
    tier = find_tier(model.config)
    template = tier.template(model, device)
    return partial(ModuleWeights, template), partial(tier.decoder, template), template.read_weights()


def find_tier(config: PreTrainedConfig) -> Tier:
    """Choose how the engine computes models of a config, by trying a narrow model of its class with random weights.

    Raises:
        ValueError: in no way; names the feature, or the difference from transformers.
    """
    return TIERS[recall_answer(config, _compare_tiers)]


def _compare_tiers(config: PreTrainedConfig) -> tuple[int, str]:
    """Return the number of the first tier that computes a model of this config, and what to tell the user."""
    if has_images(config):  # as transformers generates
        return 1, "each sample is computed separately, which is slow, because the model reads images"
    try:
        with quiet_loading():
            model = build_small_model(config)
    except Exception as error:
        # Forward passes of all tokens need no comparison: they are transformers' own.
        return -1, (
            f"no small test model can be made of its config ({first_words(error)}), so every token computes a full "
            "forward pass"
        )

    fault = ""
    for number, tier in enumerate(TIERS):
        try:
            difference = measure_difference(model, tier)
            if difference <= MAX_DIFFERENCE:
                slow = f"each sample is computed separately, which is slow, because the engine does not support {fault}"
                return number, slow if fault else ""
            tier_fault = f"this model: log-probabilities differ by {difference:.2g}"
        except UnsupportedModel as error:
            tier_fault = str(error)
        except Exception as error:  # modules that cannot do without transformers' own attention or cache
            tier_fault = f"this model's modules ({first_words(error)})"
        fault = fault or tier_fault
    name = f"{config.name_or_path or 'the model'} ({config.model_type})"
    raise ValueError(f"{name}: the embedded engine does not support {fault}")


def measure_difference(model: PreTrainedModel, tier: Tier) -> float:
    """Return the largest difference between log-probabilities of a tier and of the model's forward pass.

    Two sequences of different lengths are prefilled, the longer one in two pieces, and decoded together.

    Raises:
        UnsupportedModel: a feature that the engine does not compute.
    """
    device = torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    sequences = [torch.randint(3, vocabulary, (length,), generator=generator) for length in LENGTHS]
    with torch.inference_mode():
        expected = [
            model(input_ids=ids[None], use_cache=False).logits[0, -STEPS:].float().log_softmax(-1) for ids in sequences
        ]

    template = tier.template(copy.deepcopy(model), device)
    weights = ModuleWeights(template, model.config, template.read_weights(), torch.float32, device)
    decoder = tier.decoder(template, model.config, weights, rows=2, max_seq_len=64, dtype=torch.float32, device=device)

    with torch.inference_mode():
        long_prompt, short_prompt = (ids[:-STEPS].tolist() for ids in sequences)
        decoder.prefill([long_prompt[:PIECE], short_prompt], rows=[0, 1])
        decoder.prefill([long_prompt[PIECE:]], rows=[0], starts=[PIECE])

        positions = torch.tensor([len(long_prompt), len(short_prompt)])
        steps = zip(*(ids[-STEPS:] for ids in sequences), strict=True)
        logits = [decoder.decode(torch.stack(step), positions + i, length=64) for i, step in enumerate(steps)]

        # Only the sequences' own next tokens: improbable tokens, which no request asks for, have larger rounding.
        next_tokens = torch.stack([ids[-STEPS + 1 :] for ids in sequences])[..., None]
        differences = torch.stack(logits, 1).log_softmax(-1) - torch.stack(expected)
        return float(differences[:, :-1].gather(2, next_tokens).abs().max())
