"""What a generation engine is to those who use it, and what every engine checks in the same words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from forge.types import Completion, Sampling

if TYPE_CHECKING:
    from torch import Tensor


class EngineFailed(RuntimeError):
    """The engine has ended by a fault, and answers nothing any more; says which."""


LONGEST = 4096  # of max_seq_len, where it is not given

# Told (sample, piece): a Completion of new tokens alone, whose `finish` is "" unless they are the sample's last.
Listener = Callable[[int, Completion], None]


class Engine(Protocol):
    """Tokens in; tokens with log-probabilities and weight versions out. All methods may be called from any thread."""

    def submit(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, priority: int = 0, listener: Listener | None = None
    ) -> Future[list[Completion]]:
        """Ask for `sampling.n` completions of a prompt; cancelling the future frees what they occupy.

        Of requests that wait the one with the lowest priority number starts first, then the one that came first.
        Completions end at `max_tokens`, or before it where `max_seq_len` is reached; their text is left empty.

        listener: called in the engine's thread with the tokens of each sample as they are drawn, all of them before
        the future completes, and with none any more once it has failed. It must be quick: everybody's tokens wait for
        it. What it raises is what its request fails with.

        ValueError: an empty or too long prompt, or a token the model does not have. RuntimeError: the engine is
        closed, or has failed.
        """
        ...

    def update_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int, identity: str = ""
    ) -> Future[None]:
        """Replace all weights; `on_update` says what running sequences do. A released engine is restored.

        The tensors, under their Hugging Face names, are read and checked before this returns, beside the weights in
        use. The future completes when they are in use; of several that wait the newest is taken, and all complete
        then. It carries a ValueError naming the tensor for one that is unknown, given twice, missing or of a wrong
        shape: weights and version then stay as they were.
        """
        ...

    @property
    def version(self) -> int:
        """The version of the weights in use; of those that were in use last, while the engine is released."""
        ...

    @property
    def identity(self) -> str:
        """The identity of those weights, as their publisher stated it: "" for those of the folder."""
        ...

    def stats(self) -> dict[str, int]:
        """Counters: `running` and `waiting` sequences and, since the start, `generated_tokens`; an engine may have
        more."""
        ...

    def release(self) -> Future[None]:
        """Give up the memory of weights and cache, so that a trainer can have the device.

        Running sequences end first; whatever is submitted from now on waits. The future completes when the memory is
        free. Releases, restores and weight updates take effect in the order in which they were asked for.
        """
        ...

    def restore(self) -> Future[None]:
        """Take the memory back. The weights come with the next update, and only then do waiting requests start."""
        ...

    def close(self) -> None:
        """End the engine and its processes. Requests that are not complete fail with a RuntimeError."""
        ...


def extend(whole: Completion, piece: Completion) -> None:
    """Add to what a sample has drawn what it drew next."""
    whole.token_ids += piece.token_ids
    whole.logprobs += piece.logprobs
    whole.versions += piece.versions
    whole.top_logprobs += piece.top_logprobs
    whole.identities |= piece.identities
    whole.finish = piece.finish


def check_length(config: Any, max_seq_len: int | None) -> int:
    """The longest prompt and completion together: as asked for, else what the model allows but at most 4096 tokens.

    ValueError: less than two tokens, or more than the model allows.
    """
    limit = config.max_position_embeddings
    length = min(limit, LONGEST) if max_seq_len is None else max_seq_len
    if not 2 <= length <= limit:
        raise ValueError(f"max_seq_len must be 2 to {limit} for this model, got {max_seq_len}")
    return length


def check_request(sampling: Sampling, priority: int, vocab: int) -> None:
    """ValueError: a setting that an engine could not compute with: a temperature that is not finite, stop tokens
    outside 0 to `vocab` - 1, or a number that does not fit into 32 bits."""
    most = 2**31
    for ok, message in (
        (math.isfinite(sampling.temperature), f"temperature must be finite, got {sampling.temperature}"),
        (sampling.top_k < most, f"top_k must be below 2**31, got {sampling.top_k}"),
        (-most <= priority < most, f"priority must fit into 32 bits, got {priority}"),
        (
            all(0 <= token < vocab for token in sampling.stop_token_ids),
            f"stop_token_ids must be 0 to {vocab - 1}, got {list(sampling.stop_token_ids)}",
        ),
    ):
        if not ok:
            raise ValueError(message)


def check_prompt(prompt_ids: Sequence[int], vocab: int, max_seq_len: int) -> tuple[int, ...]:
    """The prompt. ValueError: it is empty, leaves no room for a token, or has tokens outside 0 to `vocab` - 1."""
    prompt = tuple(prompt_ids)
    if not prompt:
        raise ValueError("the prompt is empty")
    if len(prompt) >= max_seq_len:
        raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room in max_seq_len {max_seq_len}")
    if min(prompt) < 0 or max(prompt) >= vocab:
        raise ValueError(f"prompt token ids must be 0 to {vocab - 1}, got {min(prompt)} to {max(prompt)}")
    return prompt
