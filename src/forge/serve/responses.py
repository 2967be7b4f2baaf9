"""Answers in OpenAI's format; with token ids, versions and weights in fields of their own."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

from ..types import Completion
from .requests import Job


class Answer:
    """The answer to one job, whole or as the chunks of a stream.

    A choice says more than OpenAI's: `token_ids` and `versions`, one of each for every token, and `weights`, the
    identity of the weights behind each version; completions have `prompt_token_ids` there, chats beside `choices`. The
    tokens are those that were sampled: with a stop string the last one completes it, behind the end of the text.

    spelled: the text and the bytes of a token.
    """

    def __init__(self, job: Job, tokenizer: Any, spelled: Callable[[int], tuple[str, bytes]], model: str) -> None:
        self.job, self.tokenizer, self.spelled, self.model = job, tokenizer, spelled, model
        self.kind = "chat.completion" if job.chat else "text_completion"
        self.id = f"{'chatcmpl' if job.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._offsets: dict[int, int] = {}  # by choice: characters of the tokens that were told of

    def whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The answer that has all choices."""
        used = sum(len(choice["token_ids"]) for choice in choices)
        return {**self._outer(self.kind), "choices": choices, "usage": self.usage(used), **self._prompt()}

    def choice(self, index: int, text: str, completion: Completion, finish: str) -> dict[str, Any]:
        """One sample."""
        if self.job.chat:
            said: dict[str, Any] = {"message": {"role": "assistant", "content": text, "refusal": None}}
        else:
            said = {"text": self._echo(index) + text}
        return {"index": index, **said, **self._tokens(index, completion), "finish_reason": finish}

    def chunk(self, index: int, text: str, piece: Completion, *, first: bool, finish: str | None) -> dict[str, Any]:
        """A part of one sample: text that became certain, tokens that were drawn."""
        if self.job.chat:
            said: dict[str, Any] = {"delta": {"role": "assistant", "content": text} if first else {"content": text}}
        else:
            said = {"text": (self._echo(index) if first else "") + text}
        choice = {"index": index, **said, **self._tokens(index, piece), "finish_reason": finish}
        kind = "chat.completion.chunk" if self.job.chat else self.kind
        return {**self._outer(kind), "choices": [choice], **(self._prompt() if first else {})}

    def last(self, used: int) -> dict[str, Any]:
        """The chunk that says what a stream used."""
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
        # Characters that a token begins: those of UTF-8 are counted by their first bytes.
        sizes = [sum(byte & 0xC0 != 0x80 for byte in self.spelled(token)[1]) for token in ids]
        starts = list(itertools.accumulate(sizes, initial=self._offsets.get(index, 0)))
        self._offsets[index] = starts.pop()
        return {
            "tokens": [self.spelled(token)[0] for token in ids],
            "token_logprobs": logprobs,
            "top_logprobs": [
                self._by_text({**top, token: logprob}) for token, logprob, top in zip(ids, logprobs, tops, strict=True)
            ],
            "text_offset": starts,
        }

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = self.spelled(token)
        return {"token": text, "logprob": logprob, "bytes": list(raw)}

    def _by_text(self, logprobs: dict[int, float]) -> dict[str, float]:
        """By text instead of token: tokens of one text have their probabilities added up."""
        found: dict[str, float] = {}
        for token, logprob in logprobs.items():
            text = self.spelled(token)[0]
            found[text] = float(np.logaddexp(found[text], logprob)) if text in found else logprob
        return found


def failure(message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}
