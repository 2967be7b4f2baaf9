"""The interface of generation engines, and the checks they share."""

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from ..models.architecture import max_length
from ..types import Completion, Sampling

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig


class EngineFailed(RuntimeError):
    """The engine failed and no longer runs; the message names the cause."""


# The default of max_seq_len is at most this: with most models' own limit, 32k and more, a few rows fill the memory.
LONGEST = 4096

# Called with (sample, piece): a Completion of new tokens only, whose `finish` is "" unless they are the sample's last.
Listener = Callable[[int, Completion], None]


class Engine(Protocol):
    """Tokens in; tokens with log-probabilities and weight versions out. All methods may be called from any thread."""

    def submit(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, priority: int = 0, listener: Listener | None = None
    ) -> Future[list[Completion]]:
        """Start `sampling.n` completions of a prompt and return the future of all of them, in order of samples.

        Cancelling the future frees their resources. Waiting requests start by priority, lowest number first, then in
        order of submission. Completions end at `max_tokens`, or at `max_seq_len` if that is earlier; their text is
        empty.

        Args:
            listener: called in the engine's thread with new tokens of each sample. All calls come before the future
                completes, none after it failed. It must be fast, as it blocks all requests; its exceptions fail the
                request.

        Raises:
            ValueError: the prompt is empty or too long, a token is outside the vocabulary, or the grammar is invalid.
            RuntimeError: the engine is closed.
            EngineFailed: the engine has failed.
        """

    def update_weights(
        self, named_tensors: "Iterable[tuple[str, Tensor]]", version: int, identity: str = ""
    ) -> Future[None]:
        """Replace all weights; the setting `on_update` decides about running sequences. A released engine is restored.

        The tensors are read and checked before this returns, into memory in addition to the weights in use. The
        future completes when they are in use; of several pending updates the newest is applied, and all complete. It
        fails with a ValueError naming the tensor if one is unknown, duplicate, missing or of a wrong shape; the weights
        are unchanged then.

        Args:
            named_tensors: all weights, by Hugging Face name.
            version: their number; a version stands for one set of weights.
            identity: the publisher's digest of the weights. Completions have version and identity of the weights that
                drew their tokens.
        """

    @property
    def version(self) -> int:
        """Return the version of the weights in use; for a released engine, the last one."""

    @property
    def identity(self) -> str:
        """Return the identity of the weights in use, as passed to `update_weights`; "" for the folder's."""

    def stats(self) -> dict[str, int]:
        """Return counters by name: `running` and `waiting` sequences, and `generated_tokens` since the start.

        An engine may have more.
        """

    def release(self) -> Future[None]:
        """Free the memory of weights and cache, e.g. for a trainer on the same device.

        The future completes once running sequences have ended and the memory is free; later requests wait. Releases,
        restores and weight updates take effect in the order of the calls.
        """

    def restore(self) -> Future[None]:
        """Reallocate the memory of a released engine. Waiting requests start after the next weight update."""

    def held(self) -> list[int]:
        """Return the seeds of requests that wait for a scheduled weight version; an empty list while any request
        runs."""

    def close(self) -> None:
        """Stop the engine and its processes. Incomplete requests fail with a RuntimeError."""


def extend_completion(completion: Completion, piece: Completion) -> None:
    """Append `piece`, the next tokens of a sample, to its `completion`, in place."""
    completion.token_ids += piece.token_ids
    completion.logprobs += piece.logprobs
    completion.versions += piece.versions
    completion.top_logprobs += piece.top_logprobs
    completion.identities |= piece.identities
    completion.finish = piece.finish


def slice_completion(piece: Completion, start: int, end: int) -> Completion:
    """Return tokens `start` to `end` - 1 of a completion; `finish` is "" unless the last token is included."""
    versions = piece.versions[start:end]
    return replace(
        piece,
        token_ids=piece.token_ids[start:end],
        logprobs=piece.logprobs[start:end],
        versions=versions,
        identities={version: piece.identities[version] for version in versions},
        top_logprobs=piece.top_logprobs[start:end],
        finish=piece.finish if end >= len(piece.token_ids) else "",
    )


def check_length(config: "PreTrainedConfig", max_seq_len: int | None) -> int:
    """Check `max_seq_len`, and return the largest number of tokens of prompt and completion together.

    It is `max_seq_len`, or if that is None the smaller one of the model's limit and 4096.

    Raises:
        ValueError: `max_seq_len` is less than two tokens, or more than the model's limit.
    """
    limit = max_length(config)
    length = min(limit, LONGEST) if max_seq_len is None else max_seq_len
    if not 2 <= length <= limit:
        raise ValueError(f"generator.max_seq_len must be 2 to {limit} for this model, got {max_seq_len}")
    return length


def check_request(sampling: Sampling, priority: int, vocab: int) -> None:
    """Check the values of a request whose bounds depend on the engine.

    Raises:
        ValueError: the temperature is not finite, a stop token is outside 0 to `vocab` - 1, or `top_k` or the priority
            does not fit into 32 bits.
    """
    if not math.isfinite(sampling.temperature):
        raise ValueError(f"temperature must be finite, got {sampling.temperature}")
    if sampling.top_k >= 2**31:
        raise ValueError(f"top_k must be below 2**31, got {sampling.top_k}")
    if not -(2**31) <= priority < 2**31:
        raise ValueError(f"priority must fit into 32 bits, got {priority}")
    if not all(0 <= token < vocab for token in sampling.stop_token_ids):
        raise ValueError(f"stop_token_ids must be 0 to {vocab - 1}, got {list(sampling.stop_token_ids)}")


def check_prompt(prompt_ids: Sequence[int], vocab: int, max_seq_len: int) -> tuple[int, ...]:
    """Check the token ids of a prompt, and return them as a tuple.

    >>> check_prompt([5, 6], vocab=10, max_seq_len=8)
    (5, 6)

    Raises:
        ValueError: it is empty, leaves no token for a completion, or has tokens outside 0 to `vocab` - 1.
    """
    if not (prompt := tuple(prompt_ids)):
        raise ValueError("the prompt must have at least one token, got none")
    if len(prompt) >= max_seq_len:
        raise ValueError(f"a prompt of {len(prompt)} tokens must be shorter than generator.max_seq_len = {max_seq_len}")
    if min(prompt) < 0 or max(prompt) >= vocab:
        raise ValueError(f"prompt token ids must be 0 to {vocab - 1}, got {min(prompt)} to {max(prompt)}")
    return prompt
