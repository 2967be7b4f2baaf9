"""A policy in this process: the embedded engine, whose turns a script may force."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM

from forge.engines import load_engine
from forge.types import Completion, Sampling


class ForcedPolicy:
    """The endpoints of a generator over one model. `script` gets the prompt as text and says the turn, or None: then
    the engine samples it."""

    def __init__(self, folder, tokenizer, script=None):
        self.engine = load_engine("embedded", folder, slots=64)
        self.oracle = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer, self.script = tokenizer, script
        self.sampled = 0  # tokens, of complete turns
        self.streams = {}
        self.generate = SimpleNamespace(route=self._generate)
        self.open_stream = SimpleNamespace(route=self._open)
        self.next_pieces = SimpleNamespace(route=self._next)
        self.close_stream = SimpleNamespace(route=self._close)

    @asynccontextmanager
    async def session(self, name):
        yield name

    def logprobs(self, tokens):
        """Of each token but the first, by one plain forward pass."""
        with torch.no_grad():
            logits = self.oracle(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        return [0.0, *logits[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()]

    async def _generate(self, prompt, *, n, **sampling):
        said = None if self.script is None else self.script(self.tokenizer.decode(prompt))
        if said is None:
            turns = await asyncio.wrap_future(self.engine.submit(prompt, Sampling(n=n, **sampling)))
            for turn in turns:
                turn.versions = [0] * len(turn.token_ids)
        else:
            turns = [self._forced(prompt, said, **sampling) for _ in range(n)]
        self.sampled += sum(len(turn.token_ids) for turn in turns)
        return turns

    def _forced(self, prompt, said, *, max_tokens, stop_token_ids, **_):
        ids = [*self.tokenizer(said, add_special_tokens=False)["input_ids"], stop_token_ids[0]][:max_tokens]
        logprobs = self.logprobs([*prompt, *ids])[len(prompt) :]
        finish = "stop" if ids[-1] in stop_token_ids else "length"
        return Completion("", ids, logprobs, {}, tuple(prompt), [0] * len(ids), finish)

    async def _open(self, prompt, *, stream, n, **sampling):
        self.streams[stream] = [list(pair) for pair in enumerate(await self._generate(prompt, n=n, **sampling))]
        return stream

    async def _next(self, stream):
        pieces = []
        for pair in self.streams[stream]:
            sample, turn = pair
            if turn is None:
                continue
            half = max(1, len(turn.token_ids) // 2)
            first = half == len(turn.token_ids)
            finish = turn.finish if first else ""
            piece = Completion("", turn.token_ids[:half], turn.logprobs[:half], {}, (), turn.versions[:half], finish)
            pieces.append((sample, piece))
            rest = Completion(
                "", turn.token_ids[half:], turn.logprobs[half:], {}, (), turn.versions[half:], turn.finish
            )
            pair[1] = None if first else rest
        return pieces

    async def _close(self, stream):
        self.streams.pop(stream, None)

    def close(self):
        self.engine.close()
