"""What strangers can do to our HTTP servers: pages of other sites, silent and slow clients, clients without the key."""

import asyncio

import pytest
from aiohttp import ClientSession, web

from forge_http import web as access


async def hello(request: web.Request) -> web.Response:
    return web.json_response({"got": await request.text()})


async def socket(request: web.Request) -> web.WebSocketResponse:
    answer = web.WebSocketResponse()
    await answer.prepare(request)
    await answer.send_str("hello")
    return answer


def served(work, key: str | None = None):
    async def main():
        app = web.Application(middlewares=[access.guard_requests("127.0.0.1", key)])
        app.add_routes([web.get("/", hello), web.post("/", hello), web.get("/ws", socket)])
        async with (
            asyncio.timeout(60),
            access.serve_application(app, access.bind_socket("127.0.0.1", 0)) as url,
            ClientSession() as http,
        ):
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
def test_web_requests_of_other_hosts_and_origins_get_403(headers, status):
    async def work(http, url):
        plain = {"Content-Type": "application/json"} | headers
        async with http.post(url, data='{"a": 1}', headers=plain) as answer:
            assert answer.status == status
        async with http.get(f"{url}/ws", headers=headers) as answer:  # the handshake of a WebSocket needs more headers
            assert answer.status == (status if status == 403 else 400)

    served(work)


def test_websocket_from_other_origin_gets_403():
    async def work(http, url):
        async with http.ws_connect(f"{url}/ws") as opened:
            assert await opened.receive_str() == "hello"
        with pytest.raises(Exception, match="403"):
            await http.ws_connect(f"{url}/ws", headers={"Origin": "http://evil.example"})

    served(work)


def test_web_requests_without_valid_api_key_get_401():
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


def test_public_listen_address_without_api_key_raises(monkeypatch):
    monkeypatch.delenv("FORGE_API_KEY", raising=False)
    for host in ("127.0.0.1", "127.8.9.1", "::1", "localhost"):
        assert access.required_key(host) is None
    for host in ("0.0.0.0", "::", "10.0.0.3", "node7"):
        with pytest.raises(
            ValueError, match=f"{host} is reachable from other machines: set the variable FORGE_API_KEY"
        ):
            access.required_key(host)
        assert access.required_key(host, "k") == "k"
    monkeypatch.setenv("FORGE_API_KEY", "e")
    assert access.required_key("0.0.0.0") == access.required_key("localhost") == "e"


@pytest.mark.parametrize(
    "head",
    ["GET /" + "a" * 10_000 + " HTTP/1.1", "GET / HTTP/9.9", "G\0T / HTTP/1.1", "GET / HTTP/1.1\r\nContent-Length: x"],
    ids=lambda head: head[:9],
)
def test_malformed_http_request_gets_400_and_is_not_logged(head, caplog):
    async def work(_, url):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(f"{head}\r\nHost: localhost\r\n\r\n".encode())
        assert b" 400 " in await reader.readline()
        writer.close()

    served(work)
    assert not caplog.records


@pytest.mark.parametrize(
    ("body", "charset", "says"),
    [
        (b"{", "utf-8", "Expecting property name"),
        (b"[" * 20_000, "utf-8", "nested too deeply"),
        (b"[" * 200_000, "utf-8", "nested too deeply"),
        (b"\xff", "utf-8", "can't decode"),
        (b"1", "punycode", "must be UTF-8"),
        (b"1" * 5000, "utf-8", "limit"),
    ],
    ids=lambda value: str(value)[:16],
)
def test_invalid_json_body_gets_one_line_error(body, charset, says):
    async def read(request: web.Request) -> web.Response:
        try:
            return web.json_response(await access.json_of(request))
        except ValueError as error:
            return web.json_response(str(error), status=400)

    async def main():
        app = web.Application(client_max_size=8 << 20, middlewares=[access.guard_requests("127.0.0.1", None)])
        app.add_routes([web.post("/", read)])
        headers = {"Content-Type": f"application/json; charset={charset}"}
        async with access.serve_application(app, access.bind_socket("127.0.0.1", 0)) as url, ClientSession() as http:
            async with http.post(url, data=body, headers=headers) as answer:
                told = await answer.json()
            async with http.post(url, data=b'{"a": [' + b"1," * 60_000 + b"2]}", headers=headers) as longer:
                return answer.status, told, longer.status, len((await longer.json()) if charset == "utf-8" else "a")

    status, told, other, size = asyncio.run(main())
    assert (status, says in told, "\n" in told) == (400, True, False)
    assert (other, size) == ((200, 1) if charset == "utf-8" else (400, 1))
