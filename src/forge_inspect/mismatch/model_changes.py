"""Changes of the architecture: positions, masks of attention and constants; and rounding to half precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forge.models.architecture import attention_kinds

from .plain import Plain
from .search import Search, Trial, minimum, with_tensors

BASES = (1e3, 1e4, 1e5, 2.5e5, 5e5, 1e6, 2e6, 5e6, 8e6, 1e7)  # of rotary embeddings in published models


def positions(search: Search) -> Iterator[Trial]:
    """Other frequencies of the rotary embedding."""
    plain = search.plain
    rope = plain.model.config.rope_parameters or {}
    parts = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    stated = [float(part["rope_theta"]) for part in parts]
    if any(part.get("rope_type", "default") != "default" for part in parts):
        text = "the scaling of the rotary embedding (rope_scaling) was not applied"
        with plain.with_rotary(lambda part: {"rope_type": "default", "rope_theta": part["rope_theta"]}):
            yield Trial("rotary embedding", text, plain.logprobs())
    names = " and ".join(f"{base:g}" for base in dict.fromkeys(stated))

    def at(base: float) -> np.ndarray:
        with plain.with_rotary(lambda part: {**part, "rope_theta": base}):
            return plain.logprobs()

    for base in BASES:
        if stated != [base]:
            yield Trial("rotary embedding", f"the rotary base was {base:g}, and config.json has {names}", at(base))
    logarithm = minimum(lambda power: search.grade(at(10**power)), 1.0, 8.0)
    text = f"the rotary base was about {10**logarithm:.3g}, and config.json has {names}"
    yield Trial("rotary embedding", text, at(10**logarithm))


def masks(search: Search) -> Iterator[Trial]:
    """Attention that sees other keys."""
    plain = search.plain

    def within(query: Tensor, key: Tensor, window: int | None) -> Tensor:
        return key > query - window if window is not None else key >= 0

    def trial(text: str, sees: Callable[[Tensor, Tensor, int | None], Tensor]) -> Trial:
        with plain.seeing(sees):
            return Trial("attention mask", text, plain.logprobs())

    def blind(query: Tensor, key: Tensor, window: int | None) -> Tensor:
        return ((key < query) & within(query, key, window)) | ((query == 0) & (key == 0))

    yield trial("off by one in the attention mask: a token does not see itself", blind)
    yield trial(
        "off by one in the attention mask: a token sees the next one", lambda q, k, w: (k <= q + 1) & within(q, k, w)
    )
    yield trial(
        "off by one in the attention mask: no token sees the first",
        lambda q, k, w: (k <= q) & within(q, k, w) & ((k > 0) | (q == 0)),
    )
    if any(kind.window is not None for kind in attention_kinds(plain.model.config)):
        yield trial("the sliding window was not applied", lambda q, k, w: k <= q)
        for offset in (1, -1):
            text = f"off by one in the sliding window: it is {'longer' if offset > 0 else 'shorter'} by a token"
            yield trial(text, lambda q, k, w, offset=offset: (k <= q) & within(q, k, None if w is None else w + offset))  # type: ignore[misc]


def constants(search: Search) -> Iterator[Trial]:
    """Other constants of the architecture: of experts, norms, attention and embedding."""
    plain = search.plain
    config = plain.model.config
    changes: list[tuple[str, str, str, Callable[[Any], Any]]] = []
    if getattr(config, "norm_topk_prob", None) is not None:
        text = f"the gates of experts were {'not ' if config.norm_topk_prob else ''}normalised, unlike norm_topk_prob"
        changes.append(("experts", text, "norm_topk_prob", lambda value: not value))
    if getattr(config, "num_experts_per_tok", None):
        for offset in (1, -1):
            text = f"{config.num_experts_per_tok + offset} experts computed a token, and num_experts_per_tok is "
            text += str(config.num_experts_per_tok)
            if 1 <= config.num_experts_per_tok + offset <= config.num_experts:
                changes.append(("experts", text, "top_k", lambda value, offset=offset: value + offset))  # type: ignore[misc]
    for eps in (1e-5, 1e-6, 1e-8):
        text = f"norms had eps {eps:g}, and config.json has {config.rms_norm_eps:g}"
        if eps != config.rms_norm_eps:
            changes.append(("norm", text, "variance_epsilon", lambda _, eps=eps: eps))  # type: ignore[misc]
    if config.model_type == "gemma3_text":
        changes.append(("embedding", "the embedding was not scaled", "embed_scale", torch.ones_like))
    size = config.hidden_size // config.num_attention_heads
    text = f"attention was scaled by 1 / sqrt({size}), hidden_size / num_attention_heads"
    changes.append(("attention", text, "scaling", lambda value: size**-0.5))
    for kind, text, name, change in changes:
        with plain.with_attribute(name, change) as exists:
            if exists:
                yield Trial(kind, text, plain.logprobs())


def precisions(search: Search) -> Iterator[Trial]:
    """Rounding to half precision: of weights, of the head, and of all products."""
    plain = search.plain
    rounded = {name: tensor.bfloat16().float() for name, tensor in plain.tensors.items()}
    yield with_tensors(search, "bfloat16", "weights were rounded to bfloat16", rounded)
    hidden = plain.hidden()
    head = plain.model.lm_head.weight
    logits = (hidden.bfloat16() @ head.bfloat16().T).float()
    yield Trial("bfloat16", "logits were computed in bfloat16", plain.logprobs(logits))
    logits = (plain.logits(hidden) / search.store.run.temperature).bfloat16().log_softmax(-1)
    text = "log-probabilities were computed in bfloat16"
    yield Trial("bfloat16", text, logits.gather(1, plain.labels[:, None])[:, 0].float().numpy())
    yield Trial(
        "bfloat16",
        "products were rounded to bfloat16: the difference has the size of its noise",
        noise(plain),
        by_size=True,
    )


def noise(plain: Plain) -> np.ndarray:
    """Log-probabilities with all products in bfloat16, [compared]."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = plain.hidden().bfloat16()
        return plain.logprobs(plain.logits(hidden))
