"""An OpenAI-compatible endpoint in front of a generator service."""

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
from typing import Any, TypeVar

from ..actors.streams import StreamLost
from ..data.spelling import spelled
from ..engines.interface import extend
from ..runtime.controller import CallTimeout, Service
from ..system.web import guard, json_of, listen, web
from ..types import Completion
from .requests import BadRequest, Job, parse
from .responses import Answer, encoded, failure
from .samples import Piece, Samples, slices

LARGEST = 8 << 20  # bytes of a request
MOST = 1 << 23  # tokens of an answer that is no stream, each with its most probable ones
AT_ONCE = 1 << 14  # of those: one message of a generator, which is unpacked without a pause
WRITTEN = 1 << 16  # bytes that are written at once
ATTEMPTS = 3  # at a response whose generator dies
HEALTH = 10.0  # seconds for the generators' stats

T = TypeVar("T")
log = logging.getLogger(__name__)

_beside = set[asyncio.Task[None]]()  # the event loop itself holds tasks weakly


class Server:
    """Answers `/v1/chat/completions`, `/v1/completions`, `/v1/models` and `/health` from `policy`.

    Args:
        policy: a service of `forge.actors.Generator`.
        tokenizer: the model's.
        model: its name for clients.
        key: what clients must send as their API key; see `forge.system.web`.
        another: a second key, of the page that shows the run.
    """

    def __init__(
        self, policy: Service, tokenizer: Any, model: str, key: str | None = None, another: str | None = None
    ) -> None:
        self.policy, self.tokenizer, self.model, self.key, self.another = policy, tokenizer, model, key, another
        self.spelled = cache(partial(spelled, tokenizer))  # at most one entry for each token of the vocabulary

    @asynccontextmanager
    async def listen(self, at: socket.socket) -> AsyncIterator[str]:
        """Serve on a socket of `forge.system.web.bind` within the block; yields the clients' `base_url`."""
        access = guard(at.getsockname()[0], self.key, self.another)
        app = web.Application(client_max_size=LARGEST, middlewares=[_errors_as_json, access])
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
        # A full collection looks at all that PyTorch and transformers made at their import, a third of a second long.
        gc.freeze()
        try:
            async with listen(app, at) as url:
                yield f"{url}/v1"
        finally:
            gc.unfreeze()
            self.thread.shutdown(wait=False, cancel_futures=True)

    async def beside(self, at: socket.socket) -> str:
        """Serve until the event loop ends; returns the `base_url`."""
        listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def hold() -> None:
            async with self.listen(at) as address:
                listening.set_result(address)
                await asyncio.Event().wait()

        task = asyncio.create_task(hold())
        _beside.add(task)
        either: set[asyncio.Future[Any]] = {task, listening}
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
        return web.json_response({"status": "ok", "engines": await self.policy.stats.options(timeout=HEALTH).fanout()})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        chat = request.path == "/v1/chat/completions"
        try:
            body = await json_of(request)
        except ValueError as error:
            raise BadRequest(f"the body is not JSON: {error}") from None
        job = await self._in_thread(partial(parse, body, self.tokenizer, self.model, chat=chat))
        answer = Answer(job, self.tokenizer, self.spelled, self.model)
        if job.stream:
            return await self._stream(request, job, answer)
        room = Room(MOST)
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(self._samples(job, answer, i, room)) for i in range(len(job.prompts))]
        found = [task.result() for task in waiting]
        choices = [choice for some, _ in found for choice in some]
        parts = await self._in_thread(lambda: list(answer.whole(choices, sum(used for _, used in found))))
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = sum(map(len, parts))
        with suppress(ConnectionError):  # the client has disconnected
            await response.prepare(request)
            for some in parts:
                for start in range(0, len(some), WRITTEN):
                    await response.write(some[start : start + WRITTEN])
            await response.write_eof()
        return response

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """In the one thread of this server, so that templates, long texts and many samples hold up neither a run's
        event loop nor other requests: these take turns, of which each should be short."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    async def _samples(self, job: Job, answer: Answer, at: int, room: Room) -> tuple[list[bytes], int]:
        """The choices of prompt number `at`, and how many tokens they have."""
        first, n = at * job.sampling.n, job.sampling.n

        def choice(sample: int, text: str, whole: Completion, finish: str) -> bytes:
            return encoded(answer.choice(first + sample, text, whole, finish))

        if not job.stop and n * job.sampling.max_tokens * (1 + job.sampling.top_logprobs) <= AT_ONCE:
            ask = self.policy.generate.route(job.prompts[at], priority=job.priority, **_fields(job))
            found: list[Completion] = await ask
            work = [partial(choice, i, c.text, c, c.finish) for i, c in enumerate(found)]
            return [await self._in_thread(one) for one in work], sum(len(c.token_ids) for c in found)

        async def collected() -> tuple[list[bytes], int]:
            # Streamed, so that a sample is cancelled once it reaches a stop string, and no message is long.
            texts = [""] * n
            wholes: list[Completion | None] = [Completion(prompt_ids=tuple(job.prompts[at])) for _ in texts]
            done, used = [b""] * n, 0

            def add(sample: int, text: str, piece: Completion, finish: str | None) -> int:
                whole = wholes[sample]
                assert whole is not None
                texts[sample] += text
                extend(whole, piece)
                if finish is not None:
                    done[sample] = choice(sample, texts[sample], whole, finish)
                    wholes[sample] = None
                return len(piece.token_ids)

            async with aclosing(self._pieces(job, at, add)) as counts:
                async for some in counts:
                    used += sum(some)
                    room.take(sum(some) * (1 + job.sampling.top_logprobs))
            return done, used

        return await _retried(collected)

    async def _stream(self, request: web.Request, job: Job, answer: Answer) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        sending, begun = asyncio.Lock(), set[int]()

        async def send(what: bytes) -> None:
            async with sending:
                await response.prepare(request)
                await response.write(what)

        async def samples(at: int) -> int:
            used = 0

            def chunk(sample: int, text: str, piece: Completion, finish: str | None) -> tuple[int, int, bytes]:
                index = at * job.sampling.n + sample
                found = answer.chunk(index, text, piece, first=index not in begun, finish=finish)
                return index, len(piece.token_ids), _event(found)

            async with aclosing(self._pieces(job, at, chunk)) as pieces:
                async for some in pieces:
                    for index, size, event in some:
                        used += size
                        await send(event)
                        begun.add(index)
            return used

        try:
            async with asyncio.TaskGroup() as tasks:
                waiting = [
                    tasks.create_task(_retried(partial(samples, at), lambda: not begun))
                    for at in range(len(job.prompts))
                ]
            if job.usage:
                await send(_event(answer.last(sum(task.result() for task in waiting))))
            await send(b"data: [DONE]\n\n")
        except Exception as group:
            error = _first(group)
            if not response.prepared:
                raise
            if not isinstance(error, ConnectionError):  # the client has disconnected
                # Too late for a status: the client gets the error as an event, and no [DONE].
                await send(_event(_explained(error, request)[1]))
        return response

    async def _pieces(
        self, job: Job, at: int, use: Callable[[int, str, Completion, str | None], T]
    ) -> AsyncGenerator[list[T]]:
        """What `use` makes, in the thread, of each (sample, text, tokens, finish) of prompt number `at`, as they come.
        Once all samples have ended, the stream is closed."""
        samples = Samples(self.tokenizer, job)

        def turn(pieces: list[Piece]) -> list[T]:
            return [use(*said) for said in samples.take(pieces)]

        async with self.policy.session():
            stream, ask = secrets.randbits(63), {"priority": job.priority, **_fields(job)}
            try:
                await self.policy.open_stream.route(job.prompts[at], stream=stream, **ask)
                while samples.left:
                    for some in slices(await self.policy.next_pieces.route(stream)):
                        yield await self._in_thread(partial(turn, some))
            finally:
                await self.policy.close_stream.route(stream)


class Room:
    """How much an answer that is sent as a whole may still grow."""

    def __init__(self, size: int) -> None:
        self.left = size

    def take(self, size: int) -> None:
        """BadRequest: it is longer."""
        self.left -= size
        if self.left < 0:
            raise BadRequest(
                f"the answer has more than {MOST} tokens and log-probabilities: ask for fewer samples, or for a stream"
            )


def _event(found: dict[str, Any]) -> bytes:
    return b"data: " + encoded(found) + b"\n\n"


async def _retried(work: Callable[[], Awaitable[T]], allowed: Callable[[], bool] = lambda: True) -> T:
    """Retry if the generator dies, unless output has already been streamed."""
    for _ in range(ATTEMPTS - 1):
        try:
            return await work()
        except StreamLost:
            if not allowed():
                raise
    return await work()


def _fields(job: Job) -> dict[str, Any]:
    sampling = job.sampling
    return {name: getattr(sampling, name) for name in type(sampling).__dataclass_fields__}


def _first(error: BaseException) -> BaseException:
    """The first exception of a group."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _explained(error: BaseException, request: web.Request) -> tuple[int, dict[str, Any]]:
    """The status and the body for an exception; 500 is a bug."""
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
    """Every error in OpenAI's format."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return web.json_response(failure(error.reason, "invalid_request_error"), status=error.status)
    except Exception as raised:
        status, body = _explained(_first(raised), request)
        return web.json_response(body, status=status)
