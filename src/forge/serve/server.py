"""OpenAI-compatible endpoint of a generator service."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from functools import cache, partial
from typing import TypeVar

from ..actors.streams import StreamLost
from ..data.spelling import spelled as spell
from ..engines.interface import extend
from ..runtime.controller import CallTimeout, Service
from ..system.web import Json, guard, json_of, listen, web
from ..types import Completion
from .requests import BadRequest, GenerationJob, parse
from .responses import Answer, Fields, encode, failure
from .samples import Piece, Samples, slices
from .text import Tokenizer

MAX_BODY = 8 << 20  # bytes of a request
MAX_OUTPUT = 1 << 23  # tokens of a response that is not a stream, with their top log-probabilities
UNSTREAMED = 1 << 14  # the same of one message from a generator: unpacking it blocks this process
WRITTEN = 1 << 16  # bytes that are written at once
ATTEMPTS = 3  # to generate, if generators die
HEALTH_TIMEOUT = 10.0  # seconds for the generators' stats

T = TypeVar("T")
log = logging.getLogger(__name__)

_background = set[asyncio.Task[None]]()  # the event loop itself holds tasks weakly


class Server:
    """Answers `/v1/chat/completions`, `/v1/completions`, `/v1/models` and `/health` from `policy`.

    Args:
        policy: a service of `forge.actors.Generator`.
        tokenizer: of the model.
        model: its name for clients.
        key: the API key that clients must send; see `forge.system.web`.
        second_key: a second key, of the page that shows the run.
    """

    def __init__(
        self,
        policy: Service,
        tokenizer: Tokenizer,
        model: str,
        key: str | None = None,
        second_key: str | None = None,
    ) -> None:
        self.policy = policy
        self.tokenizer = tokenizer
        self.model = model
        self.key = key
        self.second_key = second_key
        self.spell = cache(partial(spell, tokenizer))  # at most one entry for each token of the vocabulary

    @asynccontextmanager
    async def listen(self, listener: socket.socket) -> AsyncIterator[str]:
        """Serve on a socket of `forge.system.web.bind` within the block; yields the clients' `base_url`."""
        access = guard(listener.getsockname()[0], self.key, self.second_key)
        app = web.Application(client_max_size=MAX_BODY, middlewares=[_errors_as_json, access])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._answer),
                web.post("/v1/completions", self._answer),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._models),
                web.get("/health", self._health),
            ]
        )
        self.thread = ThreadPoolExecutor(1, "forge-serve")
        # A full garbage collection visits all objects of PyTorch and transformers, for a third of a second.
        gc.freeze()
        try:
            async with listen(app, listener) as url:
                yield f"{url}/v1"
        finally:
            gc.unfreeze()
            self.thread.shutdown(wait=False, cancel_futures=True)

    async def listen_in_background(self, listener: socket.socket) -> str:
        """Serve until the event loop ends; return the `base_url`."""
        listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def serve() -> None:
            async with self.listen(listener) as address:
                listening.set_result(address)
                await asyncio.Event().wait()

        task = asyncio.create_task(serve())
        _background.add(task)
        # Whichever is first: an error of the socket, or the address.
        either: set[asyncio.Future] = {task, listening}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()  # raises the reason
        return listening.result()

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "torchforge"}
        name = request.match_info.get("name")
        if name not in (None, self.model):
            raise BadRequest(f"there is {self.model!r} alone", "model", 404)
        return web.json_response({"object": "list", "data": [model]} if name is None else model)

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"status": "ok", "engines": await self.policy.stats.options(timeout=HEALTH_TIMEOUT).fanout()}
        )

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        chat = request.path == "/v1/chat/completions"
        try:
            body = await json_of(request)
        except ValueError as error:
            raise BadRequest(f"the body is not JSON: {error}") from None
        # Templates and tokenizers take long for long texts: other requests go on meanwhile.
        job = await self._in_thread(partial(parse, body, self.tokenizer, self.model, chat=chat))
        answer = Answer(job, self.tokenizer, self.spell, self.model)
        if job.stream:
            return await self._stream(request, job, answer)
        # All samples share one budget, since all are in memory until the answer is complete.
        budget = OutputBudget(MAX_OUTPUT)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._samples(job, answer, i, budget)) for i in range(len(job.prompts))]
        choices = [choice for task in tasks for choice in task.result()[0]]
        tokens = sum(task.result()[1] for task in tasks)
        parts = await self._in_thread(lambda: list(answer.complete(choices, tokens)))
        # Written in parts, so that a slow client holds a part, not a copy of all.
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = sum(map(len, parts))
        with suppress(ConnectionError):  # the client has disconnected
            await response.prepare(request)
            for part in parts:
                for start in range(0, len(part), WRITTEN):
                    await response.write(part[start : start + WRITTEN])
            await response.write_eof()
        return response

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run in the one thread of this server, so that templates, long texts and many samples block neither a run's
        event loop nor other requests: they take turns, each of which should be short."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    async def _samples(
        self, job: GenerationJob, answer: Answer, prompt: int, budget: OutputBudget
    ) -> tuple[list[bytes], int]:
        """Generate the choices of prompt number `prompt`; return them encoded, and their number of tokens."""
        n = job.sampling.n
        first = prompt * n

        def choice(sample: int, text: str, completion: Completion, finish: str) -> bytes:
            return encode(answer.choice(first + sample, text, completion, finish))

        # Small outputs without stop strings need no stream: one message brings all samples.
        if not job.stop and n * job.sampling.max_tokens * (1 + job.sampling.top_logprobs) <= UNSTREAMED:
            completions: list[Completion] = await self.policy.generate.route(
                job.prompts[prompt], priority=job.priority, **_fields(job)
            )
            encoded = [
                await self._in_thread(partial(choice, i, c.text, c, c.finish)) for i, c in enumerate(completions)
            ]
            return encoded, sum(len(c.token_ids) for c in completions)

        async def collect() -> tuple[list[bytes], int]:
            # Streamed, so that a sample is cancelled once it reaches a stop string, and no message is long.
            texts = [""] * n
            partials: list[Completion | None] = [Completion(prompt_ids=tuple(job.prompts[prompt])) for _ in texts]
            choices = [b""] * n
            tokens = 0

            def add(sample: int, text: str, piece: Completion, finish: str | None) -> int:
                completion = partials[sample]
                assert completion is not None
                texts[sample] += text
                extend(completion, piece)
                if finish is not None:
                    choices[sample] = choice(sample, texts[sample], completion, finish)
                    partials[sample] = None  # its memory is not needed while others continue
                return len(piece.token_ids)

            async with aclosing(self._pieces(job, prompt, add)) as counts:
                async for sizes in counts:
                    tokens += sum(sizes)
                    budget.spend(sum(sizes) * (1 + job.sampling.top_logprobs))
            return choices, tokens

        return await _retry(collect)

    async def _stream(self, request: web.Request, job: GenerationJob, answer: Answer) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        sending = asyncio.Lock()
        begun: set[int] = set()  # choices of which a chunk was sent

        async def send(event: bytes) -> None:
            async with sending:
                await response.prepare(request)
                await response.write(event)

        async def samples(prompt: int) -> int:
            tokens = 0

            def chunk(sample: int, text: str, piece: Completion, finish: str | None) -> tuple[int, int, bytes]:
                index = prompt * job.sampling.n + sample
                fields = answer.chunk(index, text, piece, first=index not in begun, finish=finish)
                return index, len(piece.token_ids), _event(fields)

            async with aclosing(self._pieces(job, prompt, chunk)) as pieces:
                async for chunks in pieces:
                    for index, size, event in chunks:
                        tokens += size
                        await send(event)
                        begun.add(index)
            return tokens

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(_retry(partial(samples, prompt), lambda: not begun))
                    for prompt in range(len(job.prompts))
                ]
            if job.usage:
                await send(_event(answer.last(sum(task.result() for task in tasks))))
            await send(b"data: [DONE]\n\n")
        except Exception as raised:
            error = _first(raised)
            if not response.prepared:
                raise
            if not isinstance(error, ConnectionError):  # the client has disconnected
                # Too late for a status: the client gets the error as an event, and no [DONE].
                await send(_event(_error_response(error, request)[1]))
        return response

    async def _pieces(
        self, job: GenerationJob, prompt: int, use: Callable[[int, str, Completion, str | None], T]
    ) -> AsyncGenerator[list[T]]:
        """Yield the results of `use`, called in the thread with each (sample, text, tokens, finish) of prompt number
        `prompt`, as the tokens arrive. Once all samples have ended, the stream is closed."""
        samples = Samples(self.tokenizer, job)

        def turn(pieces: list[Piece]) -> list[T]:
            return [use(*piece) for piece in samples.decode(pieces)]

        # A session, so that all calls of the stream are sent to the generator that has it.
        async with self.policy.session():
            stream = secrets.randbits(63)
            options = {"priority": job.priority, **_fields(job)}
            try:
                await self.policy.open_stream.route(job.prompts[prompt], stream=stream, **options)
                while samples.running:
                    for pieces in slices(await self.policy.next_pieces.route(stream)):
                        yield await self._in_thread(partial(turn, pieces))
            finally:
                await self.policy.close_stream.route(stream)


class OutputBudget:
    """The size that a response which is not a stream may still grow by."""

    def __init__(self, size: int) -> None:
        self.remaining = size

    def spend(self, size: int) -> None:
        """Subtract `size`. BadRequest: the response is too long."""
        self.remaining -= size
        if self.remaining < 0:
            raise BadRequest(
                f"the answer has more than {MAX_OUTPUT} tokens and log-probabilities: ask for fewer samples, "
                "or for a stream"
            )


def _event(fields: Fields) -> bytes:
    return b"data: " + encode(fields) + b"\n\n"


async def _retry(work: Callable[[], Awaitable[T]], allowed: Callable[[], bool] = lambda: True) -> T:
    """Retry if the generator dies, unless output has already been streamed."""
    for _ in range(ATTEMPTS - 1):
        try:
            return await work()
        except StreamLost:
            if not allowed():
                raise
    return await work()


def _fields(job: GenerationJob) -> dict[str, Json]:
    sampling = job.sampling
    return {name: getattr(sampling, name) for name in type(sampling).__dataclass_fields__}


def _first(error: BaseException) -> BaseException:
    """Return the first exception of a group."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _error_response(error: BaseException, request: web.Request) -> tuple[int, Fields]:
    """Return status and body for an exception; 500 is a bug."""
    if isinstance(error, BadRequest):
        return error.status, failure(str(error), "invalid_request_error", error.param)
    if isinstance(error, ValueError):  # the engine rejects the prompt or the sampling
        return 400, failure(str(error), "invalid_request_error")
    if isinstance(error, CallTimeout):
        return 504, failure(str(error), "timeout")
    if isinstance(error, RuntimeError | StreamLost):  # of the controller, or of a generator
        log.warning("%s: %s", request.path, error)
        return 503, failure(str(error), "server_error")
    log.error("%s failed", request.path, exc_info=error)
    return 500, failure(f"{type(error).__name__}: {error}", "server_error")


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return every error in OpenAI's format."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return web.json_response(failure(error.reason, "invalid_request_error"), status=error.status)
    except Exception as raised:
        status, body = _error_response(_first(raised), request)
        return web.json_response(body, status=status)
