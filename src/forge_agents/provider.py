"""Models that somebody else serves: requests for them are passed on as they are, with the provider's key."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from aiohttp import ClientError, ClientSession, ClientTimeout, web

from forge_http.web import is_loopback

from .messages import BadRequest

SILENCE = 600.0  # seconds without a byte of the answer: the longest timeout of the clients
CONNECT = 30.0  # seconds
KEPT = ("content-type", "accept", "anthropic-version", "anthropic-beta", "openai-beta", "idempotency-key")
RETURNED = ("Content-Type", "Content-Encoding", "Retry-After", "Cache-Control")
UNBUFFERED = {"X-Accel-Buffering": "no"}  # reverse proxies such as nginx keep streams back otherwise
log = logging.getLogger(f"forge.{__name__}")


@dataclass(frozen=True)
class Provider:
    """A model behind another address.

    url: without `/v1`.
    key: the environment variable with the provider's key; None: it needs none.
    name: what the provider calls the model; None: the name that clients use here.
    """

    url: str
    key: str | None = None
    name: str | None = None

    async def answer(self, request: web.Request, path: str, body: Mapping[str, Any]) -> web.StreamResponse:
        """Pass a request on, and its answer back, byte for byte.

        Args:
            path: of the request, from `/v1` on.
            body: the request's JSON.

        Raises:
            BadRequest: the provider does not answer; the client may ask again.
        """
        model = str(body["model"])
        url = self.url.rstrip("/") + path
        if self.name is not None:
            body = {**body, "model": self.name}
        # A session of aiohttp belongs to one event loop, and answers take seconds: one for each request costs little.
        data = json.dumps(body)
        headers = self._headers(request)
        timeout = ClientTimeout(total=None, sock_connect=CONNECT, sock_read=SILENCE)
        response: web.StreamResponse | None = None
        is_outside = not is_loopback(urlsplit(url).hostname or "")
        try:
            async with (
                ClientSession(timeout=timeout, trust_env=is_outside, auto_decompress=False) as client,
                # Not to another host, which would get the key.
                client.post(url, data=data, headers=headers, params=request.query, allow_redirects=False) as answer,
            ):
                returned = {name: answer.headers[name] for name in RETURNED if name in answer.headers}
                response = web.StreamResponse(status=answer.status, headers={**returned, **UNBUFFERED})
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response
        except (ClientError, TimeoutError) as error:
            log.warning("%s does not answer: %s", self.url, error)
            if response is not None:  # its status is sent: only a broken connection tells the client
                if request.transport is not None:
                    request.transport.abort()
                return response
            message = f"the provider of {model} does not answer: {type(error).__name__}"
            raise BadRequest(message, status=503, code="overloaded") from error

    def _headers(self, request: web.Request) -> dict[str, str]:
        headers = {name: request.headers[name] for name in KEPT if name in request.headers}
        key = None if self.key is None else os.environ[self.key]
        if key is not None:
            headers |= {"authorization": f"Bearer {key}", "x-api-key": key}
        return {**headers, "accept-encoding": "identity"}
