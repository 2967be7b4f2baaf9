"""Responses in OpenAI's format, with additional fields for token ids, versions and weights."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Callable, Iterator

import numpy as np

from ..system.web import Json
from ..types import Completion
from .requests import GenerationJob
from .text import Tokenizer

PART = 256  # items of a list that are encoded at once: other threads can run in between
Fields = dict[str, Json]


class Answer:
    """The response to one job, complete or as the chunks of a stream.

    Beyond OpenAI's fields a choice has `token_ids` and `versions`, one of each per token, and `weights`, the identity
    of the weights of each version; completions also have `prompt_token_ids` there, chats beside `choices`. The tokens
    are all that were sampled: with a stop string they include it, while the text ends before it.

    Args:
        spell: returns the text and the bytes of a token.
    """

    def __init__(
        self,
        job: GenerationJob,
        tokenizer: Tokenizer,
        spell: Callable[[int], tuple[str, bytes]],
        model: str,
    ) -> None:
        self.job = job
        self.tokenizer = tokenizer
        self.spell = spell
        self.model = model
        self.kind = "chat.completion" if job.chat else "text_completion"
        self.id = f"{'chatcmpl' if job.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._offsets: dict[int, int] = {}  # by choice: characters of the tokens sent so far

    def complete(self, choices: list[bytes], completion_tokens: int) -> Iterator[bytes]:
        """Yield the response in parts; `choices` are encoded already."""
        fields = {"usage": self.usage(completion_tokens), **self._prompt()}
        yield encode(self._header(self.kind))[:-1] + b', "choices": ['
        for number, choice in enumerate(choices):
            yield b", " * (number > 0) + choice
        yield b"], " + encode(fields)[1:]

    def choice(self, index: int, text: str, completion: Completion, finish: str) -> Fields:
        """Return the choice of one sample."""
        if self.job.chat:
            content: Fields = {"message": {"role": "assistant", "content": text, "refusal": None}}
        else:
            content = {"text": self._echo(index) + text}
        return {"index": index, **content, **self._tokens(index, completion), "finish_reason": finish}

    def chunk(self, index: int, text: str, piece: Completion, *, first: bool, finish: str | None) -> Fields:
        """Return a chunk of one sample: new text and tokens."""
        if self.job.chat:
            content: Fields = {"delta": {"role": "assistant", "content": text} if first else {"content": text}}
        else:
            content = {"text": (self._echo(index) if first else "") + text}
        choice = {"index": index, **content, **self._tokens(index, piece), "finish_reason": finish}
        kind = "chat.completion.chunk" if self.job.chat else self.kind
        return {**self._header(kind), "choices": [choice], **(self._prompt() if first else {})}

    def last(self, completion_tokens: int) -> Fields:
        """Return the last chunk of a stream, with its usage."""
        kind = "chat.completion.chunk" if self.job.chat else self.kind
        return {**self._header(kind), "choices": [], "usage": self.usage(completion_tokens)}

    def usage(self, completion_tokens: int) -> dict[str, int]:
        """Count the tokens of the prompts, each prompt once, and of the samples."""
        prompt_tokens = sum(map(len, self.job.prompts))
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }

    def _header(self, kind: str) -> Fields:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _prompt(self) -> Fields:
        return {"prompt_token_ids": self.job.prompts[0]} if self.job.chat else {}

    def _echo(self, index: int) -> str:
        prompt = self.job.prompts[index // self.job.sampling.n]
        return self.tokenizer.decode(prompt, skip_special_tokens=True) if self.job.echo else ""

    def _tokens(self, index: int, completion: Completion) -> Fields:
        fields: Fields = {
            "token_ids": completion.token_ids,
            "versions": completion.versions,
            "weights": {str(version): identity for version, identity in completion.identities.items()},
            "logprobs": self._logprobs(index, completion) if self.job.logprobs else None,
        }
        if not self.job.chat:
            fields["prompt_token_ids"] = self.job.prompts[index // self.job.sampling.n]
        return fields

    def _logprobs(self, index: int, completion: Completion) -> Fields:
        ids = completion.token_ids
        logprobs = completion.logprobs
        tops = completion.top_logprobs or [{} for _ in ids]
        if self.job.chat:
            content = [
                {**self._entry(token, logprob), "top_logprobs": [self._entry(*pair) for pair in top.items()]}
                for token, logprob, top in zip(ids, logprobs, tops, strict=True)
            ]
            return {"content": content, "refusal": None}
        # Characters that begin in a token: first bytes in UTF-8.
        sizes = [sum(byte & 0xC0 != 0x80 for byte in self.spell(token)[1]) for token in ids]
        starts = list(itertools.accumulate(sizes, initial=self._offsets.get(index, 0)))
        self._offsets[index] = starts.pop()
        # A dict by text, as OpenAI's: probabilities of tokens with the same text add up.
        by_text: list[dict[str, float]] = []
        for sampled, sampled_logprob, top in zip(ids, logprobs, tops, strict=True):
            sums: dict[str, float] = {}
            for token, logprob in {**top, sampled: sampled_logprob}.items():
                text = self.spell(token)[0]
                sums[text] = float(np.logaddexp(sums[text], logprob)) if text in sums else logprob
            by_text.append(sums)
        return {
            "tokens": [self.spell(token)[0] for token in ids],
            "token_logprobs": logprobs,
            "top_logprobs": by_text,
            "text_offset": starts,
        }

    def _entry(self, token: int, logprob: float) -> Fields:
        text, raw = self.spell(token)
        return {"token": text, "logprob": logprob, "bytes": list(raw)}


def encode(value: Json) -> bytes:
    """Encode JSON, long lists in parts: the encoder blocks all other threads until it returns."""
    return "".join(_parts(value)).encode()


def _parts(value: Json) -> Iterator[str]:
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


def failure(message: str, kind: str, param: str | None = None) -> Fields:
    """Return an error in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}
