"""An OpenAI-compatible endpoint in front of a generator service."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

from ..actors.streams import StreamLost
from ..controller import CallTimeout, Service
from ..data.spelling import spelled
from ..engines.interface import extend
from ..types import Completion
from ..web import guard, listen, web
from .requests import BadRequest, Job, parse
from .responses import Answer, failure
from .text import TextStream

LARGEST = 8 << 20  # bytes of a request
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
        key: what clients must send as their API key; see `forge.web`.
    """

    def __init__(self, policy: Service, tokenizer: Any, model: str, key: str | None = None) -> None:
        self.policy, self.tokenizer, self.model, self.key = policy, tokenizer, model, key
        self.spelled = cache(partial(spelled, tokenizer))  # at most one entry for each token of the vocabulary
        self.thread = ThreadPoolExecutor(1, "forge-serve")

    @asynccontextmanager
    async def listen(self, at: socket.socket) -> AsyncIterator[str]:
        """Serve on a socket of `forge.web.bind` within the block; yields the clients' `base_url`."""
        access = guard(at.getsockname()[0], self.key)
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
        async with listen(app, at) as url:
            yield f"{url}/v1"

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
            body = await request.json()
        except (ValueError, RecursionError, LookupError) as error:  # LookupError: an unknown charset
            raise BadRequest(f"the body is not JSON: {error}") from None
        # In a thread: templates and long texts would block a run's event loop.
        loop, work = asyncio.get_running_loop(), partial(parse, body, self.tokenizer, self.model, chat=chat)
        job = await loop.run_in_executor(self.thread, work)
        answer = Answer(job, self.tokenizer, self.spelled, self.model)
        if job.stream:
            return await self._stream(request, job, answer)
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(self._samples(job, answer, i)) for i in range(len(job.prompts))]
        return web.json_response(answer.whole([choice for task in waiting for choice in task.result()]))

    async def _samples(self, job: Job, answer: Answer, at: int) -> list[dict[str, Any]]:
        """The choices of prompt number `at`."""
        first = at * job.sampling.n
        if not job.stop:
            ask = self.policy.generate.route(job.prompts[at], priority=job.priority, **_fields(job))
            return [answer.choice(first + i, c.text, c, c.finish) for i, c in enumerate(await ask)]

        async def collected() -> list[dict[str, Any]]:
            # Streamed, so that a sample is cancelled once it reaches a stop string.
            texts, ends = [""] * job.sampling.n, [""] * job.sampling.n
            wholes = [Completion(prompt_ids=tuple(job.prompts[at])) for _ in texts]
            async with aclosing(self._pieces(job, at)) as pieces:
                async for i, text, piece, finish in pieces:
                    texts[i] += text
                    extend(wholes[i], piece)
                    ends[i] = finish or ""
            return [answer.choice(first + i, texts[i], wholes[i], ends[i]) for i in range(job.sampling.n)]

        return await _retried(collected)

    async def _stream(self, request: web.Request, job: Job, answer: Answer) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        sending, begun = asyncio.Lock(), set[int]()

        async def send(what: str) -> None:
            async with sending:
                await response.prepare(request)
                await response.write(f"data: {what}\n\n".encode())

        async def samples(at: int) -> int:
            used = 0
            async with aclosing(self._pieces(job, at)) as pieces:
                async for i, text, piece, finish in pieces:
                    used += len(piece.token_ids)
                    index = at * job.sampling.n + i
                    await send(json.dumps(answer.chunk(index, text, piece, first=index not in begun, finish=finish)))
                    begun.add(index)
            return used

        try:
            async with asyncio.TaskGroup() as tasks:
                waiting = [
                    tasks.create_task(_retried(partial(samples, at), lambda: not begun))
                    for at in range(len(job.prompts))
                ]
            if job.usage:
                await send(json.dumps(answer.last(sum(task.result() for task in waiting))))
            await send("[DONE]")
        except Exception as group:
            error = _first(group)
            if not response.prepared:
                raise
            if not isinstance(error, ConnectionError):  # the client has disconnected
                # Too late for a status: the client gets the error as an event, and no [DONE].
                await send(json.dumps(_explained(error, request)[1]))
        return response

    async def _pieces(self, job: Job, at: int) -> AsyncGenerator[tuple[int, str, Completion, str | None]]:
        """(sample, text, tokens, finish) of prompt number `at`, as they come. A sample ends at a stop string; once all
        have ended, the stream is closed."""
        texts = [TextStream(self.tokenizer, job.stop) for _ in range(job.sampling.n)]
        left = set(range(job.sampling.n))
        async with self.policy.session():
            stream, ask = secrets.randbits(63), {"priority": job.priority, **_fields(job)}
            try:
                await self.policy.open_stream.route(job.prompts[at], stream=stream, **ask)
                while left:
                    for i, piece in await self.policy.next_pieces.route(stream):
                        if i not in left:
                            continue
                        before = len(texts[i].token_ids)
                        text = texts[i].add(piece.token_ids)
                        size = len(texts[i].token_ids) - before  # without tokens after a stop string
                        versions = piece.versions[:size]
                        piece = replace(
                            piece,
                            token_ids=piece.token_ids[:size],
                            logprobs=piece.logprobs[:size],
                            versions=versions,
                            identities={version: piece.identities[version] for version in versions},
                            top_logprobs=piece.top_logprobs[:size],
                        )
                        if piece.finish or texts[i].stopped:
                            left.remove(i)
                            text += texts[i].end()
                        yield i, text, piece, "stop" if texts[i].stopped else piece.finish or None
            finally:
                await self.policy.close_stream.route(stream)


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
