"""What strangers can do to our HTTP servers: pages of other sites, silent and slow clients, clients without the key."""

import asyncio
import json

import pytest
from aiohttp import ClientSession, web

from forge import web as access


async def hello(request: web.Request) -> web.Response:
    return web.json_response({"got": await request.text()})


async def socket(request: web.Request) -> web.WebSocketResponse:
    answer = web.WebSocketResponse()
    await answer.prepare(request)
    await answer.send_str("hello")
    return answer


async def closed(reader: asyncio.StreamReader) -> bool:
    """Whether the other side ends the connection without an answer."""
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


def served(work, key: str | None = None):
    async def main():
        app = web.Application(middlewares=[access.guard("127.0.0.1", key)])
        app.add_routes([web.get("/", hello), web.post("/", hello), web.get("/ws", socket)])
        async with access.listen(app, access.bind("127.0.0.1", 0)) as url, ClientSession() as http:
            return await work(http, url)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:9"}, 200),
        ({"Host": "[::1]:9"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "[broken"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_only_this_machines_own_programs_are_answered(headers, status):
    async def work(http, url):
        plain = {"Content-Type": "application/json"} | headers
        async with http.post(url, data='{"a": 1}', headers=plain) as answer:
            assert answer.status == status
        async with http.get(f"{url}/ws", headers=headers) as answer:  # the handshake of a WebSocket needs more headers
            assert answer.status == (status if status == 403 else 400)

    served(work)


def test_a_page_of_another_site_opens_no_socket():
    async def work(http, url):
        async with http.ws_connect(f"{url}/ws") as opened:
            assert await opened.receive_str() == "hello"
        with pytest.raises(Exception, match="403"):
            await http.ws_connect(f"{url}/ws", headers={"Origin": "http://evil.example"})

    served(work)


def test_with_a_key_the_key_decides():
    async def work(http, url):
        for given, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": "Bearer \udcff"}, 401),
            ({"Authorization": "Bearer sécret"}, 200),
        ):
            async with http.get(url, headers={"Host": "train-3.cluster", **given}) as answer:
                assert answer.status == status

    served(work, "sécret")


def test_an_address_that_others_reach_needs_a_key(monkeypatch):
    monkeypatch.delenv("FORGE_API_KEY", raising=False)
    for host in ("127.0.0.1", "127.8.9.1", "::1", "localhost"):
        assert access.required_key(host) is None
    for host in ("0.0.0.0", "::", "10.0.0.3", "node7"):
        with pytest.raises(ValueError, match=f"other machines reach {host}: set FORGE_API_KEY"):
            access.required_key(host)
        assert access.required_key(host, "k") == "k"
    monkeypatch.setenv("FORGE_API_KEY", "e")
    assert access.required_key("0.0.0.0") == access.required_key("localhost") == "e"


def test_connections_beyond_the_limit_are_closed_and_silent_ones_too(monkeypatch):
    monkeypatch.setattr(access, "CONNECTIONS", 4)
    monkeypatch.setattr(access, "HEADER_TIME", 0.5)

    async def work(http, url):
        port = int(url.rpartition(":")[2])
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        held[0][1].write(b"GET / HTTP/1.1\r\nHost: localhost\r\n")  # half a request
        held[1][1].write(b"\r\n\r\n")  # blank lines, which may come before one
        held[2][1].write(b"\r\n\r\nGET / HTTP/1.1\r\n")
        held.append(await asyncio.open_connection("127.0.0.1", port))
        assert await closed(held[-1][0])
        assert all([await closed(reader) for reader, _ in held])
        for _, writer in held:
            writer.close()
        async with http.get(url) as answer:
            assert answer.status == 200

    served(work)


def test_a_body_that_does_not_come_ends_its_request(monkeypatch):
    monkeypatch.setattr(access, "BODY_TIME", 0.5)

    async def work(_, url):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        head = "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{"
        writer.write(head.encode())
        assert b"408" in await reader.readline()
        writer.close()

    served(work)


def test_a_whole_request_takes_as_long_as_it_needs(monkeypatch):
    monkeypatch.setattr(access, "HEADER_TIME", 0.3)

    async def slow(_: web.Request) -> web.Response:
        await asyncio.sleep(1.0)
        return web.json_response({})

    async def main():
        app = web.Application(middlewares=[access.guard("127.0.0.1", None)])
        app.add_routes([web.post("/", slow)])
        async with (
            access.listen(app, access.bind("127.0.0.1", 0)) as url,
            ClientSession() as http,
            http.post(url, data=json.dumps("x" * 200_000), headers={"Content-Type": "application/json"}) as a,
        ):
            return a.status

    assert asyncio.run(main()) == 200
