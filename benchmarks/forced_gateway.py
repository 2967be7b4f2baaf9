"""The real gateway over a policy without an engine, whose turns a function decides: for programs that speak to it.

The policy has a tokenizer of bytes, made on the spot. Its turns are tokens all the same, so that the tree, the
certificate and the episode of a session are those of training.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from threading import Thread
from types import SimpleNamespace
from typing import Any

from scripted_gateway import write_hello
from transformers import PreTrainedTokenizerFast

from forge.types import Completion
from forge_agents.gateway import Gateway
from forge_agents.messages import Message, ModelRequest, ModelTurn, Schema
from forge_agents.policies import Policy
from forge_agents.record import SessionRecord
from forge_agents.settings import Access, SessionSettings
from forge_envs.dialogue import Dialogue
from forge_http.web import bind

TURN = "<|im_start|>"
END = "<|im_end|>"
TOOLS = "# Tools\n\n"  # before the schemas of tools, in the template chatml
LOGPROB = -0.5  # of every token


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each byte, and those of ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<|endoftext|>", TURN, END]
    names = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=special[0],
        pad_token=special[0],
        additional_special_tokens=special[1:],
        clean_up_tokenization_spaces=False,
    )


class ForcedPolicy:
    """The endpoints of a generator that says what `write_hello` decides from the text of the prompt."""

    def __init__(self, dialogue: Dialogue) -> None:
        self.dialogue = dialogue
        self._streams: dict[int, list[Completion]] = {}
        self.generate = SimpleNamespace(route=self._generate)
        self.open_stream = SimpleNamespace(route=self._open)
        self.next_pieces = SimpleNamespace(route=self._next)
        self.close_stream = SimpleNamespace(route=self._close)

    @asynccontextmanager
    async def session(self, name: str) -> AsyncIterator[str]:
        """Do nothing: there is one replica."""
        yield name

    async def _generate(self, prompt: list[int], *, n: int, grammar: str = "", **options: Any) -> list[Completion]:
        text = str(self.dialogue.tokenizer.decode(prompt, skip_special_tokens=False))
        said = _text(write_hello(read_prompt(text, has_schema=bool(grammar) and "<tool_call>" not in grammar))[0])
        size: int = options["max_tokens"]
        ids = [*self.dialogue.tokenizer(said, add_special_tokens=False)["input_ids"], options["stop_token_ids"][0]]
        finish = "stop" if len(ids) <= size else "length"
        ids = ids[:size]
        return [Completion("", ids, [LOGPROB] * len(ids), {}, tuple(prompt), [0] * len(ids), finish) for _ in range(n)]

    async def _open(self, prompt: list[int], *, stream: int, **options: Any) -> int:
        self._streams[stream] = await self._generate(prompt, **options)
        return stream

    async def _next(self, stream: int) -> list[tuple[int, Completion]]:
        turns = self._streams[stream]
        self._streams[stream] = []
        return list(enumerate(turns))

    async def _close(self, stream: int) -> None:
        self._streams.pop(stream, None)


def read_prompt(text: str, *, has_schema: bool) -> ModelRequest:
    """The conversation and the tools of a prompt in ChatML."""
    messages: list[Message] = []
    tools: list[Schema] = []
    for turn in text.split(TURN)[1:-1]:
        role, _, content = turn.partition("\n")
        content = content.partition(END)[0]
        # The template has no line break between this role and the results.
        if "<tool_response>" in role or content.startswith("<tool_response>"):
            role = "tool"
        if role == "system" and TOOLS in content:
            tools = list(_schemas(content.rpartition(TOOLS)[2]))
        messages.append({"role": role, "content": content})
    return ModelRequest("", tuple(messages), tuple(tools), schema={} if has_schema else None)


class ForcedGateway:
    """A `Gateway` in a thread."""

    def __init__(self, model: str) -> None:
        self.model = model
        dialogue = Dialogue(byte_tokenizer(), "chatml", "hermes")
        policy = Policy(ForcedPolicy(dialogue), dialogue, sampling={"temperature": 1.0})
        self._gateway = Gateway({model: policy})
        self._loop = asyncio.new_event_loop()

    @contextmanager
    def serve(self) -> Iterator[ForcedGateway]:
        """Serve within the block."""
        started: Future[None] = Future()
        stop = asyncio.Event()

        async def run() -> None:
            try:
                async with self._gateway.listen(bind("127.0.0.1", 0)):
                    started.set_result(None)
                    await stop.wait()
            except Exception as error:
                started.set_exception(error)

        thread = Thread(target=self._loop.run_until_complete, args=(run(),))
        thread.start()
        try:
            started.result(60)
            yield self
        finally:
            self._loop.call_soon_threadsafe(stop.set)
            thread.join(60)
            self._loop.close()

    def open(self) -> Access:
        """A new session without a limit that an agent would meet."""

        async def begin() -> Access:
            return self._gateway.open(SessionSettings(max_tokens=1 << 20, max_turns=1000))

        return asyncio.run_coroutine_threadsafe(begin(), self._loop).result(60)

    def close(self, access: Access) -> SessionRecord:
        """End a session."""
        return asyncio.run_coroutine_threadsafe(self._gateway.close(access.key), self._loop).result(60)


def _schemas(text: str) -> Iterator[Schema]:
    for line in text.splitlines():
        if line.startswith("{") and '"function"' in line:
            yield json.loads(line)


def _text(turn: ModelTurn) -> str:
    """A turn as a model with the syntax hermes writes it."""
    parts: Sequence[str] = [f"<think>\n{turn.thought}\n</think>\n\n" if turn.thought else "", turn.content]
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'
        for call in turn.calls
    ]
    return "".join([*parts, *calls])
