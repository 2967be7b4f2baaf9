"""Responses in OpenAI's format, with additional fields for token ids, versions and weights."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..types import Completion
from .requests import Job

PART = 256  # items of a list that are encoded at once


class Answer:
    """The response to one job, whole or as the chunks of a stream.

    Beyond OpenAI's fields a choice has `token_ids` and `versions`, one of each per token, and `weights`, the identity
    of the weights of each version; completions have `prompt_token_ids` there, chats beside `choices`. The tokens are
    all that were sampled: with a stop string they include it, while the text ends before it.

    Args:
        spelled: returns the text and the bytes of a token.
    """

    def __init__(self, job: Job, tokenizer: Any, spelled: Callable[[int], tuple[str, bytes]], model: str) -> None:
        self.job, self.tokenizer, self.spelled, self.model = job, tokenizer, spelled, model
        self.kind = "chat.completion" if job.chat else "text_completion"
        self.id = f"{'chatcmpl' if job.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._offsets: dict[int, int] = {}  # by choice: characters of the tokens sent so far

    def whole(self, choices: list[bytes], used: int) -> Iterator[bytes]:
        """The response in parts: with all choices as JSON, which have so many tokens."""
        rest = {"usage": self.usage(used), **self._prompt()}
        yield encoded(self._outer(self.kind))[:-1] + b', "choices": ['
        for number, choice in enumerate(choices):
            yield b", " * (number > 0) + choice
        yield b"], " + encoded(rest)[1:]

    def choice(self, index: int, text: str, completion: Completion, finish: str) -> dict[str, Any]:
        """One sample."""
        if self.job.chat:
            said: dict[str, Any] = {"message": {"role": "assistant", "content": text, "refusal": None}}
        else:
            said = {"text": self._echo(index) + text}
        return {"index": index, **said, **self._tokens(index, completion), "finish_reason": finish}

    def chunk(self, index: int, text: str, piece: Completion, *, first: bool, finish: str | None) -> dict[str, Any]:
        """A part of one sample: new text and tokens."""
        if self.job.chat:
            said: dict[str, Any] = {"delta": {"role": "assistant", "content": text} if first else {"content": text}}
        else:
            said = {"text": (self._echo(index) if first else "") + text}
        choice = {"index": index, **said, **self._tokens(index, piece), "finish_reason": finish}
        kind = "chat.completion.chunk" if self.job.chat else self.kind
        return {**self._outer(kind), "choices": [choice], **(self._prompt() if first else {})}

    def last(self, used: int) -> dict[str, Any]:
        """The last chunk of a stream, with its usage."""
        kind = "chat.completion.chunk" if self.job.chat else self.kind
        return {**self._outer(kind), "choices": [], "usage": self.usage(used)}

    def usage(self, used: int) -> dict[str, int]:
        """Tokens of the prompts, each counted once, and of the samples."""
        given = sum(map(len, self.job.prompts))
        return {"prompt_tokens": given, "completion_tokens": used, "total_tokens": given + used}

    def _outer(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.job.prompts[0]} if self.job.chat else {}

    def _echo(self, index: int) -> str:
        prompt = self.job.prompts[index // self.job.sampling.n]
        return self.tokenizer.decode(prompt, skip_special_tokens=True) if self.job.echo else ""

    def _tokens(self, index: int, completion: Completion) -> dict[str, Any]:
        found: dict[str, Any] = {
            "token_ids": completion.token_ids,
            "versions": completion.versions,
            "weights": {str(version): identity for version, identity in completion.identities.items()},
            "logprobs": self._logprobs(index, completion) if self.job.logprobs else None,
        }
        if not self.job.chat:
            found["prompt_token_ids"] = self.job.prompts[index // self.job.sampling.n]
        return found

    def _logprobs(self, index: int, completion: Completion) -> dict[str, Any]:
        ids, logprobs = completion.token_ids, completion.logprobs
        tops = completion.top_logprobs or [{} for _ in ids]
        if self.job.chat:
            content = [
                {**self._named(token, logprob), "top_logprobs": [self._named(*one) for one in top.items()]}
                for token, logprob, top in zip(ids, logprobs, tops, strict=True)
            ]
            return {"content": content, "refusal": None}
        # Characters that begin in a token: first bytes in UTF-8.
        sizes = [sum(byte & 0xC0 != 0x80 for byte in self.spelled(token)[1]) for token in ids]
        starts = list(itertools.accumulate(sizes, initial=self._offsets.get(index, 0)))
        self._offsets[index] = starts.pop()
        by_text: list[dict[str, float]] = []  # probabilities of tokens with the same text add up
        for sampled, sampled_logprob, top in zip(ids, logprobs, tops, strict=True):
            found: dict[str, float] = {}
            for token, logprob in {**top, sampled: sampled_logprob}.items():
                text = self.spelled(token)[0]
                found[text] = float(np.logaddexp(found[text], logprob)) if text in found else logprob
            by_text.append(found)
        return {
            "tokens": [self.spelled(token)[0] for token in ids],
            "token_logprobs": logprobs,
            "top_logprobs": by_text,
            "text_offset": starts,
        }

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = self.spelled(token)
        return {"token": text, "logprob": logprob, "bytes": list(raw)}


def encoded(value: Any) -> bytes:
    """JSON. Long lists in parts: the encoder keeps all other threads waiting until it returns."""
    return "".join(_parts(value)).encode()


def _parts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield "{"
        for number, (key, item) in enumerate(value.items()):
            yield f"{', ' * (number > 0)}{json.dumps(key)}: "
            yield from _parts(item)
        yield "}"
    elif isinstance(value, list) and len(value) > PART:
        for start in range(0, len(value), PART):
            yield ("[" if start == 0 else ", ") + json.dumps(value[start : start + PART])[1:-1]
        yield "]"
    else:
        yield json.dumps(value)


def failure(message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}
