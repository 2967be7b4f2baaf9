"""The gateway: an address that clients of OpenAI and Anthropic take for their provider, with a session for each key."""

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from forge.actors.streams import StreamLost
from forge.envs.config import EpisodeConfig
from forge.runtime.controller import CallTimeout, ForgeActor, Service, endpoint
from forge_http.web import bearer_key, bind_socket, guard_requests, json_of, serve_application, web

from .dialects import Dialect
from .dialects.anthropic import AnthropicDialect
from .dialects.chat import ChatDialect
from .dialects.completions import CompletionsDialect
from .dialects.responses import ResponsesDialect
from .messages import BadRequest
from .policies import Policy
from .record import SessionRecord
from .session import Generation, Session
from .settings import MAX_BODY, Access, SessionSettings

UNBUFFERED = {"X-Accel-Buffering": "no"}  # reverse proxies such as nginx keep streams back otherwise
PING = 10.0  # seconds without an event after which a client gets one without content
RETRY_AFTER = 1  # seconds
SILENCE = 5.0  # seconds that a closing session waits for the last answers to be written

DIALECTS: dict[str, Dialect] = {
    "/chat/completions": ChatDialect(),
    "/completions": CompletionsDialect(),
    "/responses": ResponsesDialect(),
    "/messages": AnthropicDialect(),
}
log = logging.getLogger(f"forge.{__name__}")


class Gateway:
    """Sessions and their HTTP server.

    Args:
        policies: by the name that clients ask for.
    """

    def __init__(self, policies: Mapping[str, Policy]) -> None:
        self.policies = policies
        self.sessions: dict[str, Session] = {}
        self.url = ""
        # One thread: a tokenizer is not shared between threads (transformers #47085), and notes keep their order.
        self.thread = ThreadPoolExecutor(1, "forge-gateway")

    def open(self, settings: SessionSettings) -> Access:
        """Start a session with a new key."""
        key = secrets.token_hex(16)
        self.sessions[key] = self._make_session(key, settings)
        return Access(self.url, key)

    async def close(self, key: str) -> SessionRecord:
        """End a session, whose key expires.

        Raises:
            KeyError: no session has this key.
        """
        session = self.sessions[key]
        # The client may have its last answer before this process has noted it.
        if session.readers:
            await asyncio.wait(session.readers, timeout=SILENCE)
        self.sessions.pop(key, None)
        await session.close()
        return SessionRecord(
            {name: tuple(tree.runs) for name, tree in session.trees.items()},
            frozenset(session.delivered),
            dict(session.counts),
        )

    @asynccontextmanager
    async def listen(self, listener: socket.socket) -> AsyncIterator[str]:
        """Serve on a socket of `forge_http.web.bind_socket` within the block; yields the address without `/v1`."""
        async with serve_application(self._make_application(listener.getsockname()[0]), listener) as url:
            self.url = url
            yield url

    def _make_application(self, host: str) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[_return_errors, self.access(host)])
        for prefix in ("/v1", "", "/s/{key}/v1", "/s/{key}"):
            for path in DIALECTS:
                app.router.add_post(prefix + path, self._answer_request)
            app.router.add_post(f"{prefix}/messages/count_tokens", self._count_tokens)
            app.router.add_get(f"{prefix}/models", self._list_models)
        return app

    def access(self, host: str) -> Any:
        """Return the middleware that says who may call: those that have a session's key, and no page of a browser."""
        return guard_requests(host, None)

    def _make_session(self, key: str, settings: SessionSettings) -> Session:
        return Session(key, settings, self.policies, self._in_thread)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    async def _answer_request(self, request: web.Request) -> web.StreamResponse:
        dialect = _dialect_of(request)
        session = self._session_of(request)
        parsed = dialect.read(await _body_of(request))
        generation = session.answer(dialect, parsed)
        with session.reading(generation):
            write = self._answer_stream if parsed.stream else self._answer_whole
            return await write(request, dialect, session, generation)

    async def _answer_whole(
        self, request: web.Request, dialect: Dialect, session: Session, generation: Generation
    ) -> web.StreamResponse:
        async for _ in generation.pieces(PING):
            pass
        response = web.json_response(dialect.complete(generation.request, generation.turns))
        await response.prepare(request)
        await response.write_eof()
        self._mark_sent(request, session, generation)
        return response

    async def _answer_stream(
        self, request: web.Request, dialect: Dialect, session: Session, generation: Generation
    ) -> web.StreamResponse:
        writer = dialect.writer(generation.request, generation.ids)
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **UNBUFFERED}
        response = web.StreamResponse(headers=headers)

        try:
            async for piece in generation.pieces(PING):
                if not response.prepared:
                    await response.prepare(request)
                    await response.write(writer.begin(generation.prompt_tokens))
                if data := writer.ping() if piece is None else writer.delta(piece):
                    await response.write(data)

            if not response.prepared:
                await response.prepare(request)
                await response.write(writer.begin(generation.prompt_tokens))
            await response.write(writer.end(generation.turns))

            # Many clients hang up at the last event, before the end of the body is written to them.
            self._mark_sent(request, session, generation)
            await response.write_eof()
        except ConnectionError:
            raise
        except Exception as raised:
            if not response.prepared:
                raise
            await response.write(writer.failure(_as_request_error(raised)))
            await response.write_eof()

        return response

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        session = self._session_of(request)
        parsed = _dialect_of(request).read(await _body_of(request))
        _, ids, _ = await self._in_thread(partial(session.context, parsed))
        return web.json_response({"input_tokens": len(ids)})

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        models = [
            {"id": name, "object": "model", "type": "model", "created": 0, "owned_by": "torchforge"}
            | {"display_name": name, "created_at": "1970-01-01T00:00:00Z"}
            for name in self._session_of(request).policies
        ]
        ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]}
        return web.json_response({"object": "list", "data": models, "has_more": False, **ends})

    def _mark_sent(self, request: web.Request, session: Session, generation: Generation) -> None:
        """Note that the client of a request has its answer, unless the connection broke while it was written."""
        if request.transport is not None and not request.transport.is_closing():
            session.mark_delivered(generation)

    def _session_of(self, request: web.Request) -> Session:
        """Return the session of a request's key. BadRequest: it has none, or another one."""
        # A dict's lookup is by hash: its time tells nothing of other keys.
        session = self.sessions.get(client_key(request))
        if session is None:
            message = "the API key is missing or wrong, or its session has ended"
            raise BadRequest(message, status=401, code="invalid_api_key")
        return session


@dataclass(frozen=True)
class PolicySettings:
    """A policy as a gateway's process builds it.

    service: of generators.
    model: the folder with its tokenizer.
    episode: how its messages become tokens.
    """

    service: Service
    model: str
    episode: EpisodeConfig
    sampling: Mapping[str, Any] = field(default_factory=dict)
    whole_turns: bool = False

    def build(self) -> Policy:
        """Return the policy, with its tokenizer."""
        dialogue = self.episode.dialogue(self.model)
        return Policy(self.service, dialogue, self.sampling, self.whole_turns)


class GatewayActor(ForgeActor):
    """Serves the sessions of a run, on a port of 127.0.0.1.

    Args:
        policies: by the name that clients ask for.
    """

    vital = True

    def __init__(self, policies: Mapping[str, PolicySettings]) -> None:
        self.policies = policies
        self._served = AsyncExitStack()
        self._begun = asyncio.Lock()

    def setup(self) -> None:
        """Open the tokenizers; the server starts with the first session, in its event loop."""
        self.gateway = Gateway({name: settings.build() for name, settings in self.policies.items()})

    @endpoint
    async def open(self, settings: SessionSettings) -> Access:
        """Start a session."""
        async with self._begun:
            if not self.gateway.url:
                await self._served.enter_async_context(self.gateway.listen(bind_socket("127.0.0.1", 0)))
        return self.gateway.open(settings)

    @endpoint
    async def close(self, key: str) -> SessionRecord:
        """End a session. KeyError: it was lost with an earlier gateway."""
        return await self.gateway.close(key)


def client_key(request: web.Request) -> str:
    """Return the key that a client of any dialect sends; "" for none."""
    named = request.headers.get("x-api-key")
    return request.match_info.get("key") or named or bearer_key(request)


def _dialect_of(request: web.Request) -> Dialect:
    """Return the dialect of a path; of an unknown one OpenAI's."""
    path = request.path.removesuffix("/count_tokens")
    return next((dialect for end, dialect in DIALECTS.items() if path.endswith(end)), DIALECTS["/chat/completions"])


async def _body_of(request: web.Request) -> Any:
    """Return the JSON of a request."""
    try:
        return await json_of(request)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None


def _error_response(dialect: Dialect, error: BadRequest) -> web.Response:
    headers = {"Retry-After": str(RETRY_AFTER)} if error.status in (429, 503) else {}
    return web.json_response(dialect.error(error), status=error.status, headers=headers)


def _as_request_error(raised: BaseException) -> BadRequest:
    """Return the error of a request for a failed generation. A 503 says that the client can repeat the request."""
    while isinstance(raised, BaseExceptionGroup):
        raised = raised.exceptions[0]
    if isinstance(raised, BadRequest):
        return raised
    if isinstance(raised, ValueError | RecursionError):  # the latter of lists in lists, a thousand deep
        return BadRequest(str(raised))
    if isinstance(raised, RuntimeError | StreamLost | CallTimeout):
        log.warning("a request waits for its retry: %s", raised)
        return BadRequest(f"the policy is not available now: {raised}", status=503, code="overloaded")
    log.error("a generation failed", exc_info=raised)
    return BadRequest(f"{type(raised).__name__}: {raised}", status=500, code="server_error")


@web.middleware
async def _return_errors(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    """Return every error of the server in the client's dialect."""
    dialect = _dialect_of(request)
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge:
        return _error_response(dialect, BadRequest(f"the body has more than {MAX_BODY} bytes", status=413))
    except web.HTTPException as error:
        return _error_response(dialect, BadRequest(error.reason, status=error.status))
    except ConnectionError:  # the client is gone
        raise
    except Exception as error:
        return _error_response(dialect, _as_request_error(error))
