"""The gateway: an HTTP server with the APIs of OpenAI and Anthropic, in which each API key has its own session."""

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
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
from .policies import Generation, Policy
from .record import SessionRecord
from .session import Session
from .settings import MAX_BODY, Access, SessionSettings

PING = 10.0  # seconds without an event after which a client is sent one without content
SILENCE = 5.0  # seconds that a closing session waits until its last answers are written

DIALECTS: dict[str, Dialect] = {
    "/chat/completions": ChatDialect(),
    "/completions": CompletionsDialect(),
    "/responses": ResponsesDialect(),
    "/messages": AnthropicDialect(),
}
log = logging.getLogger(f"forge.{__name__}")


class Gateway:
    """Sessions, and the HTTP server that answers their clients.

    Args:
        policies: the policies by the names that clients ask for.
    """

    key: str | None = None  # that all clients must send; a session's own is checked in `_session_of`

    def __init__(self, policies: Mapping[str, Policy]) -> None:
        self.policies = policies
        self.sessions: dict[str, Session] = {}
        self.url = ""
        # One thread: a tokenizer cannot be used by two threads at once (transformers #47085).
        self.thread = ThreadPoolExecutor(1, "forge-gateway")

    def open(self, settings: SessionSettings) -> Access:
        """Start a session, and return the address and the new key with which clients reach it."""
        key = secrets.token_hex(16)
        self.sessions[key] = self._make_session(key, settings)
        return Access(self.url, key)

    async def close(self, key: str) -> SessionRecord:
        """End a session, and return what it has recorded; its key is invalid from then on.

        Raises:
            KeyError: no session has this key.
        """
        session = self.sessions[key]
        # A client may have received its last answer, and its agent ended, before `_mark_sent` has run here.
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
        """Serve on a socket of `forge_http.web.bind_socket` within the block; yield the address without `/v1`."""
        async with serve_application(self._make_application(listener.getsockname()[0]), listener) as url:
            self.url = url
            yield url

    def _make_application(self, host: str) -> web.Application:
        app = web.Application(
            client_max_size=MAX_BODY, middlewares=[_return_errors, guard_requests(host, self.key, key_of=client_key)]
        )
        # Clients differ in whether their base URL includes /v1. The key is in the path for those that send none.
        for prefix in ("/v1", "", "/s/{key}/v1", "/s/{key}"):
            for path in DIALECTS:
                app.router.add_post(prefix + path, self._answer_request)
            app.router.add_post(f"{prefix}/messages/count_tokens", self._count_tokens)
            app.router.add_get(f"{prefix}/models", self._list_models)
        return app

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
        # Wait for the end of the generation; its turns have all text.
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
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # reverse proxies such as nginx keep streams back otherwise
            }
        )

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

            # Before the end of the body: many clients close the connection after the last event.
            self._mark_sent(request, session, generation)
            await response.write_eof()
        except ConnectionError:  # the client is gone
            raise
        except Exception as raised:
            # Before the first event, `_return_errors` can still respond with the status of the error.
            if not response.prepared:
                raise
            await response.write(writer.failure(_as_request_error(raised)))
            await response.write_eof()

        return response

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        session = self._session_of(request)
        parsed = _dialect_of(request).read(await _body_of(request))
        return web.json_response({"input_tokens": await session.count_tokens(parsed)})

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        # One answer for both APIs: the fields of OpenAI's and Anthropic's lists together.
        models = [
            {"id": name, "object": "model", "type": "model", "created": 0, "owned_by": "torchforge"}
            | {"display_name": name, "created_at": "1970-01-01T00:00:00Z"}
            for name in self._session_of(request).policies
        ]
        return web.json_response(
            {
                "object": "list",
                "data": models,
                "has_more": False,
                "first_id": models[0]["id"],
                "last_id": models[-1]["id"],
            }
        )

    def _mark_sent(self, request: web.Request, session: Session, generation: Generation) -> None:
        """Record that the client has received an answer, unless the connection was closed during the write."""
        if request.transport is not None and not request.transport.is_closing():
            session.delivered.update(generation.ids)

    def _session_of(self, request: web.Request) -> Session:
        """Return the session whose key a request has; BadRequest, with status 401, if no session has it."""
        # The time of a dict's lookup does not depend on how much of a wrong key is right, as it is by hash.
        if (session := self.sessions.get(client_key(request))) is None:
            raise BadRequest(
                "the API key is missing or wrong, or the session of the key has ended",
                status=401,
                code="invalid_api_key",
            )
        return session


@dataclass(frozen=True)
class PolicySettings:
    """Picklable settings from which the gateway's process builds a `Policy`.

    service: a service of `forge.actors.Generator`.
    model: the folder with the tokenizer.
    episode: the settings by which messages become tokens.
    sampling, whole_turns: as in `Policy`.
    """

    service: Service
    model: str
    episode: EpisodeConfig
    sampling: Mapping[str, Any] = field(default_factory=dict)
    whole_turns: bool = False

    def build(self) -> Policy:
        """Open the tokenizer, and return the policy."""
        return Policy(self.service, self.episode.dialogue(self.model), self.sampling, self.whole_turns)


class GatewayActor(ForgeActor):
    """Component that serves the gateway sessions of a run on a free port of 127.0.0.1.

    Args:
        policies: the policies by the names that clients ask for.
    """

    vital = True

    def __init__(self, policies: Mapping[str, PolicySettings]) -> None:
        self.policies = policies
        self._server = AsyncExitStack()
        self._start_lock = asyncio.Lock()

    def setup(self) -> None:
        """Open the tokenizers. The server is started by the first session: here no event loop runs yet."""
        self.gateway = Gateway({name: settings.build() for name, settings in self.policies.items()})

    @endpoint
    async def open(self, settings: SessionSettings) -> Access:
        """Start a session, and the server before the first one; return how clients reach the session."""
        async with self._start_lock:
            if not self.gateway.url:
                await self._server.enter_async_context(self.gateway.listen(bind_socket("127.0.0.1", 0)))
        return self.gateway.open(settings)

    @endpoint
    async def close(self, key: str) -> SessionRecord:
        """End a session, and return what it has recorded.

        Raises:
            KeyError: no session has this key: it was lost when the gateway was restarted.
        """
        return await self.gateway.close(key)


def client_key(request: web.Request) -> str:
    """Return the API key of a request: from its path, Anthropic's header, or OpenAI's header; "" if it has none."""
    return request.match_info.get("key") or request.headers.get("x-api-key") or bearer_key(request)


def _dialect_of(request: web.Request) -> Dialect:
    """Return the dialect of a request's path, Chat Completions for an unknown path."""
    path = request.path.removesuffix("/count_tokens")
    return next((dialect for end, dialect in DIALECTS.items() if path.endswith(end)), DIALECTS["/chat/completions"])


async def _body_of(request: web.Request) -> Any:
    """Return the parsed JSON body of a request; BadRequest if it is not JSON."""
    try:
        return await json_of(request)
    except ValueError as error:
        raise BadRequest(f"the request body must be JSON: {error}") from None


def _error_response(dialect: Dialect, error: BadRequest) -> web.Response:
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    return web.json_response(dialect.error(error), status=error.status, headers=headers)


def _as_request_error(raised: BaseException) -> BadRequest:
    """Return the error that a client gets for an exception. Status 503 means that it can repeat the request."""
    while isinstance(raised, BaseExceptionGroup):
        raised = raised.exceptions[0]
    if isinstance(raised, BadRequest):
        return raised
    if isinstance(raised, ValueError | RecursionError):  # RecursionError: thousands of nested lists in the body
        return BadRequest(str(raised))
    if isinstance(raised, RuntimeError | StreamLost | CallTimeout):
        log.warning("a request will be retried: %s", raised)
        return BadRequest(f"the policy is not available now: {raised}", status=503, code="overloaded")
    log.error("a generation request failed", exc_info=raised)
    return BadRequest(f"{type(raised).__name__}: {raised}", status=500, code="server_error")


@web.middleware
async def _return_errors(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    """Answer a request by its handler, and convert all exceptions to errors in the format of the client's API."""
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
