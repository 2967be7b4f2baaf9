"""Mutual TLS from one secret, and the daemon's answers, within one process."""

import asyncio
import datetime
import os
from pathlib import Path

import pytest

from forge_cluster import credentials
from forge_cluster.credentials import Credentials, NoSecret, read_secret
from forge_cluster.wire import connect_host, receive_message, send_message

SECRET = "a secret that is long enough to be one"


def made(folder: Path, name: str, secret: str = SECRET, **more) -> Credentials:
    (folder / name).mkdir(mode=0o700, exist_ok=True)
    return Credentials.make(secret, folder / name, **more)


async def exchange(server: Credentials, client: Credentials) -> dict | None:
    """What a client gets from a server that answers once."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        send_message(writer, {"got": await receive_message(reader)})
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=server.context(server=True))
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        reader, writer = await connect_host(f"127.0.0.1:{port}", client)
        send_message(writer, {"do": "x"})
        try:
            return await receive_message(reader)
        finally:
            writer.close()


def test_cluster_peers_with_same_secret_connect(tmp_path):
    found = asyncio.run(exchange(made(tmp_path, "a"), made(tmp_path, "b", addresses=["10.1.2.3", "node-7"])))
    assert found == {"got": {"do": "x"}}


def test_cluster_peer_with_other_secret_is_rejected(tmp_path):
    with pytest.raises(ConnectionError, match="has another secret, or something else listens there"):
        asyncio.run(exchange(made(tmp_path, "a"), made(tmp_path, "b", SECRET + "!")))


def test_expired_cluster_certificate_is_reported(tmp_path):
    old = made(tmp_path, "a", lifetime=-datetime.timedelta(hours=1))
    with pytest.raises(ConnectionError, match="a certificate has expired; start the workers again"):
        asyncio.run(exchange(old, made(tmp_path, "b")))


def test_cluster_key_files_are_private_and_do_not_contain_secret(tmp_path):
    own = made(tmp_path, "a")
    assert {path.stat().st_mode & 0o777 for path in (own.ca, own.certificate, own.key)} == {0o600}
    assert SECRET not in own.key.read_text()


def test_cluster_secret_is_read_only_from_private_file(tmp_path, monkeypatch):
    monkeypatch.delenv(credentials.SECRET, raising=False)
    with pytest.raises(NoSecret, match="FORGE_SECRET is not set"):
        read_secret()
    monkeypatch.setenv(credentials.SECRET, SECRET)
    assert read_secret() == SECRET
    monkeypatch.setenv(credentials.SECRET, "short")
    with pytest.raises(NoSecret, match="the secret has 5 characters, but at least 32 are needed"):
        read_secret()
    file = tmp_path / "secret"
    monkeypatch.setenv(credentials.SECRET, str(file))
    with pytest.raises(NoSecret, match="names a file that could not be read"):
        read_secret()
    file.write_text(f"{SECRET}\n")
    file.chmod(0o644)
    with pytest.raises(NoSecret, match=f"chmod 600 {file}"):
        read_secret()
    os.chmod(file, 0o600)
    assert read_secret() == SECRET
