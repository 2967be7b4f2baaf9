"""The gateway: an address that clients of OpenAI and Anthropic take for their provider, with a session for each key."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from forge.actors.streams import StreamLost
from forge.runtime.controller import CallTimeout
from forge_http.web import guard, json_of, listen, web

from . import journal as events
from .dialects import Dialect
from .dialects.anthropic import AnthropicDialect
from .dialects.chat import ChatDialect
from .dialects.completions import CompletionsDialect
from .dialects.responses import ResponsesDialect
from .generation import Generation
from .journal import Journal
from .messages import BadRequest
from .policies import Policy
from .provider import UNBUFFERED, Provider
from .record import SessionRecord
from .session import Session
from .settings import MAX_BODY, Access, SessionSettings
from .tree import TokenRun

PING = 10.0  # seconds without an event after which a client gets one without content
GONE = 499  # a status that no client sees: it has disconnected
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
        journal: where sessions survive this object; None: they do not.
        providers: of models that somebody else serves, by name.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        journal: Path | None = None,
        providers: Mapping[str, Provider] | None = None,
    ) -> None:
        self.policies = policies
        self.providers = providers or {}
        self.journal = None if journal is None else Journal(journal)
        self.sessions: dict[str, Session] = {}
        self.closed: dict[str, SessionRecord] = {}
        self.url = ""
        self._notes: set[asyncio.Task[None]] = set()  # of deliveries, which are being written to the journal
        # One thread: a tokenizer is not shared between threads (transformers #47085).
        self.thread = ThreadPoolExecutor(1, "forge-gateway")
        if self.journal is not None:
            self._restore(self.journal)

    def open(self, settings: SessionSettings, key: str | None = None) -> Access:
        """Begin a session.

        Args:
            key: of 32 hexadecimal digits, by default a new one. A key that is open already keeps its session: a call
                whose answer was lost may be repeated.
        """
        key = key or secrets.token_hex(16)
        if key not in self.sessions:
            session = self.sessions[key] = self._session(key, settings)
            if self.journal is not None:
                self.journal.write(key, events.opened(settings, time.time() + session.ends_at - time.monotonic()))
        return Access(self.url, key)

    async def close(self, key: str) -> SessionRecord:
        """End a session, whose key expires; its record may be asked for until `forget`.

        Raises:
            KeyError: there is no such session.
        """
        if key in self.closed:
            return self.closed[key]
        session = self.sessions[key]
        # The client may have its last answer before this process has noted it.
        await session.written(SILENCE)
        await self._noted()
        self.sessions.pop(key, None)
        await session.close()
        record = SessionRecord(
            {name: tuple(tree.runs) for name, tree in session.trees.items()},
            frozenset(session.delivered),
            dict(session.counts),
            session.limit,
            {name: sorted(values) for name, values in session.asked.items()},
        )
        self.closed[key] = record
        return record

    def forget(self, key: str) -> None:
        """Drop the record of a closed session, and its journal."""
        self.closed.pop(key, None)
        if self.journal is not None:
            self.journal.forget(key)

    @asynccontextmanager
    async def listen(self, listener: socket.socket) -> AsyncIterator[str]:
        """Serve on a socket of `forge_http.web.bind` within the block; yields the address without `/v1`."""
        async with listen(self._application(listener.getsockname()[0]), listener) as url:
            self.url = url
            yield url
        await self._noted()

    @asynccontextmanager
    async def listen_by_tls(self, listener: socket.socket, context: ssl.SSLContext, host: str) -> AsyncIterator[str]:
        """The same for other machines, which name the gateway `host`; sessions keep the address of `listen`."""
        # Another application, as a request must name the host of the address that it came to.
        async with listen(self._application(host), listener, context) as url:
            yield url

    def _application(self, host: str) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[_errors, self.access(host)])
        for prefix in ("/v1", "", "/s/{key}/v1", "/s/{key}"):
            for path in DIALECTS:
                app.router.add_post(prefix + path, self._answer)
            app.router.add_post(f"{prefix}/messages/count_tokens", self._count)
            app.router.add_get(f"{prefix}/models", self._models)
        return app

    def access(self, host: str) -> Any:
        """The middleware that says who may call: those that have a session's key, and no page of a browser."""
        return guard(host, None)

    def _session(self, key: str, settings: SessionSettings) -> Session:
        async def commit(policy: str, runs: Sequence[TokenRun]) -> None:
            if self.journal is not None:
                lines = [events.sampled(policy, run) for run in runs]
                await asyncio.to_thread(self.journal.write, key, *lines)

        return Session(key, settings, self.policies, self._in_thread, commit, known=(*self.policies, *self.providers))

    def _restore(self, journal: Journal) -> None:
        for key, (first, *rest) in journal.read():
            session = self._session(key, SessionSettings(**first["settings"]))
            session.ends_at = time.monotonic() + first["ends_at"] - time.time()
            for event in rest:
                if event["kind"] == "turn":
                    session.restore(event["policy"], events.run_of(event))
                else:
                    session.delivered.update(event["ids"])
            self.sessions[key] = session
        if self.sessions:
            log.info("the gateway is back with %d sessions", len(self.sessions))

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        dialect = _dialect_of(request)
        try:
            session = self._session_of(request)
            body = await request.read()
            content = await _body_of(request)
            if (provider := self._provider_of(content)) is not None:
                with session.forwarding(content["model"]):
                    return await provider.answer(request, _path_of(request), content)
            parsed = dialect.read(content)
            session.policy_of(parsed.model)
            digest = hashlib.sha256(request.path.encode(errors="surrogateescape") + body).digest()
            is_retry = request.headers.get("x-stainless-retry-count", "0") not in ("0", "")
            await session.settle(digest)
            generation = session.answer(dialect, parsed, digest, is_retry=is_retry)
        except BadRequest as error:
            return _error_response(dialect, error)
        with session.reading(generation):
            write = self._stream if parsed.stream else self._whole
            response: web.StreamResponse
            try:
                response = await write(request, dialect, session, generation)
            except ConnectionError:  # the client is gone, and may come again
                return web.Response(status=GONE)
            finally:
                if generation.is_delivered and self.journal is not None:
                    self._begin_note(self.journal, session.key, generation.ids)
            return response

    def _begin_note(self, journal: Journal, key: str, ids: Sequence[str]) -> None:
        """Write to the journal that answers were delivered, beside the request: a client that hangs up cancels that."""
        note = asyncio.create_task(asyncio.to_thread(journal.write, key, events.delivered(ids)))
        self._notes.add(note)
        note.add_done_callback(self._notes.discard)

    async def _noted(self) -> None:
        """Wait until the journal has what was delivered by now."""
        if self._notes:
            await asyncio.wait(self._notes)

    async def _whole(
        self, request: web.Request, dialect: Dialect, session: Session, generation: Generation
    ) -> web.StreamResponse:
        try:
            async for _ in generation.pieces(PING):
                pass
        except Exception as raised:
            return _error_response(dialect, _as_request_error(raised))
        response = web.json_response(dialect.complete(generation.request, generation.turns))
        await response.prepare(request)
        await response.write_eof()
        _mark_sent(request, session, generation)
        return response

    async def _stream(
        self, request: web.Request, dialect: Dialect, session: Session, generation: Generation
    ) -> web.StreamResponse:
        writer = dialect.events(generation.request, generation.ids)
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
            _mark_sent(request, session, generation)
            await response.write_eof()
        except ConnectionError:
            raise
        except Exception as raised:
            error = _as_request_error(raised)
            if not response.prepared:
                return _error_response(dialect, error)
            await response.write(writer.failure(error))
            await response.write_eof()
        return response

    async def _count(self, request: web.Request) -> web.StreamResponse:
        dialect = _dialect_of(request)
        try:
            session = self._session_of(request)
            content = await _body_of(request)
            if (provider := self._provider_of(content)) is not None:
                return await provider.answer(request, _path_of(request), content)
            parsed = dialect.read(content)
            _, ids, _ = await self._in_thread(partial(session.context, parsed))
        except BadRequest as error:
            return _error_response(dialect, error)
        return web.json_response({"input_tokens": len(ids)})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        try:
            session = self._session_of(request)
        except BadRequest as error:
            return _error_response(DIALECTS["/chat/completions"], error)
        models = [
            {"id": name, "object": "model", "type": "model", "created": 0, "owned_by": "torchforge"}
            | {"display_name": name, "created_at": "1970-01-01T00:00:00Z"}
            for name in (*session.policies, *self.providers)
        ]
        first = models[0]["id"]
        return web.json_response(
            {"object": "list", "data": models, "has_more": False, "first_id": first, "last_id": models[-1]["id"]}
        )

    def _provider_of(self, content: Any) -> Provider | None:
        """The provider of the model that a request's JSON names; None: it is sampled here, or unknown."""
        model = content.get("model") if isinstance(content, dict) else None
        return self.providers.get(model) if isinstance(model, str) else None

    def _session_of(self, request: web.Request) -> Session:
        """The session of a request's key. BadRequest: it has none, or another one."""
        key = client_key(request)
        # A dict's lookup is by hash: its time tells nothing of other keys.
        session = self.sessions.get(key)
        if session is None:
            raise BadRequest(
                "the session of this API key has ended" if key in self.closed else "the API key is missing or wrong",
                status=401,
                code="invalid_api_key",
            )
        return session


def _path_of(request: web.Request) -> str:
    """The path from `/v1` on, which clients may omit, without the session's key."""
    path = request.path.removeprefix(f"/s/{request.match_info.get('key')}")
    return path if path.startswith("/v1") else f"/v1{path}"


def client_key(request: web.Request) -> str:
    """The key that a client of any dialect sends; "" for none."""
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
    named = request.headers.get("x-api-key")
    return request.match_info.get("key") or named or bearer


def _mark_sent(request: web.Request, session: Session, generation: Generation) -> None:
    """Note that the client of a request has its answer, unless the connection broke while it was written."""
    if request.transport is not None and not request.transport.is_closing():
        session.mark_delivered(generation)


def _dialect_of(request: web.Request) -> Dialect:
    """The dialect of a path; of an unknown one OpenAI's."""
    path = request.path.removesuffix("/count_tokens")
    return next((dialect for end, dialect in DIALECTS.items() if path.endswith(end)), DIALECTS["/chat/completions"])


async def _body_of(request: web.Request) -> Any:
    """The JSON of a request."""
    try:
        return await json_of(request)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None


def _error_response(dialect: Dialect, error: BadRequest) -> web.Response:
    headers = {"Retry-After": str(RETRY_AFTER)} if error.status in (429, 503) else {}
    return web.json_response(dialect.error(error), status=error.status, headers=headers)


def _as_request_error(raised: BaseException) -> BadRequest:
    """An error of a generation as one of the request: what the client may repeat is a 503."""
    while isinstance(raised, BaseExceptionGroup):
        raised = raised.exceptions[0]
    if isinstance(raised, BadRequest):
        return raised
    if isinstance(raised, ValueError):
        return BadRequest(str(raised))
    if isinstance(raised, RuntimeError | StreamLost | CallTimeout):
        log.warning("a request waits for its retry: %s", raised)
        return BadRequest(f"the policy is not available now: {raised}", status=503, code="overloaded")
    log.error("a generation failed", exc_info=raised)
    return BadRequest(f"{type(raised).__name__}: {raised}", status=500, code="server_error")


@web.middleware
async def _errors(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    """Return every error of the server in the client's dialect."""
    dialect = _dialect_of(request)
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge:
        return _error_response(dialect, BadRequest(f"the body has more than {MAX_BODY} bytes", status=413))
    except web.HTTPException as error:
        return _error_response(dialect, BadRequest(error.reason, status=error.status))
