"""Changes of how numbers are read off the logits, and of the tokens before them; and all changes in their order.

Each function yields trials: a sentence and the log-probabilities with that change, [compared]. The changes come from
reports about trainers and engines that disagree; docs/mismatch.md lists them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forge.models.tokenizer import open_tokenizer

from .model_changes import constants, masks, positions, precisions
from .search import Search, Trial, minimum
from .weight_changes import adapters, exchanged, heads, old_cache, stale

TRIMMED = 8  # tokens at an end of the context that a template may add
# The noise of half precision is reproduced in size alone: its kernels round in another order.


def temperatures(search: Search) -> Iterator[Trial]:
    """Logits at another temperature, and log-probabilities that were divided by it after the softmax."""
    plain, run = search.plain, search.store.run
    logits = plain.logits()
    for value in dict.fromkeys((1.0, run.temperature**2, 1 / run.temperature)):
        if value != run.temperature:
            words = "the temperature was not applied" if value == 1 else f"the temperature was {value:.4g}"
            text = f"{words}: the numbers are those of {value:.4g}, and grpo.temperature is {run.temperature:g}"
            yield Trial("temperature", text, plain.logprobs(logits, value))
    after = plain.logprobs(logits, 1.0) / run.temperature
    text = (
        f"the temperature {run.temperature:g} divided the log-probabilities after the softmax, not the logits before it"
    )
    if run.temperature != 1:
        yield Trial("temperature", text, after)
    fitted = minimum(lambda value: search.grade(plain.logprobs(logits, value)), 0.1, 5.0)
    text = f"the numbers are those of temperature {fitted:.4g}, and grpo.temperature is {run.temperature:g}"
    yield Trial("temperature", text, plain.logprobs(logits, fitted))


def renormalised(search: Search) -> Iterator[Trial]:
    """Log-probabilities of the distribution that is drawn from, after top-k and top-p."""
    logits = search.plain.logits() / search.store.run.temperature
    top_p, top_k = float(search.setting("grpo.top_p") or 1), int(search.setting("grpo.top_k") or 0)
    min_p = float(search.setting("grpo.min_p") or 0)
    bounds = {"top_k": top_k > 0, "top_p": top_p < 1, "min_p": min_p > 0}
    names = " and ".join(name for name, is_set in bounds.items() if is_set)
    candidates = [(top_k, top_p, min_p, names)] if names else []
    # Settings that the configuration does not have, but an engine may: of generation_config.json.
    candidates += [(0, p, 0.0, f"top_p {p}") for p in (0.8, 0.9, 0.95) if p != top_p]
    candidates += [(k, 1.0, 0.0, f"top_k {k}") for k in (20, 40, 50) if k != top_k and k < logits.shape[-1]]
    for k, p, smallest, name in candidates:
        bounded_logprobs = (
            _bounded(logits, k, p, smallest).log_softmax(-1).gather(1, search.plain.labels[:, None])[:, 0].numpy()
        )
        # Tokens that were excluded cannot have been drawn, but rounding at the edge may put one outside.
        bounded_logprobs = np.where(np.isfinite(bounded_logprobs), bounded_logprobs, search.plain.logprobs(logits, 1.0))
        text = f"log-probabilities were renormalised over what {name} leaves: they should be those of all tokens"
        yield Trial("top_p", text, bounded_logprobs)


def _bounded(logits: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Logits [rows, vocabulary] with -inf for what the bounds of sampling exclude."""
    ordered, order = logits.sort(-1, descending=True)
    probs = ordered.softmax(-1)
    excluded = torch.zeros_like(ordered, dtype=torch.bool)
    if top_k:
        excluded[:, top_k:] = True
        probs = ordered.masked_fill(excluded, -torch.inf).softmax(-1)
    excluded |= (probs.cumsum(-1) - probs >= top_p) & (top_p < 1)
    excluded |= probs < min_p * probs[:, :1]
    excluded[:, 0] = False
    return torch.empty_like(logits).scatter_(-1, order, ordered.masked_fill(excluded, -torch.inf))


def shifts(search: Search) -> Iterator[Trial]:
    """Numbers that belong to the neighbouring token."""
    plain = search.plain
    for distance, word in ((1, "next"), (-1, "one before")):
        yield Trial("mask", f"off by one: a token has the number of the {word}", plain.shifted(distance))
    for shift, word in ((1, "after"), (-1, "before")):
        text = f"off by one: tokens are scored by the state one place {word} the one that predicts them"
        yield Trial("mask", text, plain.logprobs(shift=shift))


def contexts(search: Search) -> Iterator[Trial]:
    """Other tokens before the answer: a dropped or doubled first token, another template."""
    plain = search.plain
    before = plain.contexts
    words = open_tokenizer(str(search.store.run.start))
    bos = getattr(words, "bos_token_id", None)

    def trial(kind: str, text: str, changed: Sequence[Sequence[int]]) -> Iterator[Trial]:
        # A side may lack a few tokens of its context, but cannot predict from none.
        if list(map(list, changed)) != before and all(changed):
            yield Trial(kind, text, plain.logprobs(contexts=changed))

    if bos is not None:
        if all(context[0] == bos for context in before):
            yield from trial("BOS", "the first token (BOS) was dropped", [context[1:] for context in before])
        yield from trial("BOS", "a BOS token came before the recorded ones", [[bos, *context] for context in before])
    for text, changed in _templates(search, words):
        yield from trial("template", text, changed)
    for count in range(1, TRIMMED + 1):
        plural = "" if count == 1 else "s"
        shorter = [context[:-count] for context in before]
        yield from trial("template", f"the last {count} token{plural} of the context were not there", shorter)
        kind = "BOS" if count == 1 and bos is None else "template"
        shorter = [context[count:] for context in before]
        yield from trial(kind, f"the first {count} token{plural} of the context (such as BOS) were not there", shorter)


def _templates(search: Search, words: Any) -> Iterator[tuple[str, list[list[int]]]]:
    """Other ways to write the prompts of a run whose sequences have one turn."""
    run = search.store.run
    texts = [sequence.prompt for sequence in run.sequences]
    if not all(texts):
        return
    for special in (True, False):
        written = [list(words(text, add_special_tokens=special).input_ids) for text in texts]
        yield "the prompt was written without the chat template", written
    if not getattr(words, "chat_template", None):
        return
    system = search.setting("dataset.system_prompt")
    for with_system in dict.fromkeys((bool(system), False)):
        for prompted in (True, False):
            talks = [[{"role": "user", "content": text}] for text in texts]
            if with_system:
                talks = [[{"role": "system", "content": system}, *talk] for talk in talks]
            rendered = [words.apply_chat_template(t, tokenize=False, add_generation_prompt=prompted) for t in talks]
            written = [list(words(text, add_special_tokens=False).input_ids) for text in rendered]
            name = "the chat template" + ("" if prompted else " without the prompt of the answer")
            yield (
                f"the prompt was written by {name}{'' if with_system or not system else ', without the system prompt'}",
                written,
            )


# In this order: the first that reproduces the numbers is the answer, so that the more general ones come last.
CHANGES = (
    *(temperatures, renormalised, shifts, contexts, adapters, heads, stale, old_cache, exchanged),
    *(positions, masks, constants, precisions),
)
