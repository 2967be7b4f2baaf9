"""Agents on other machines: the gateway by HTTPS, with the user's certificate."""

import datetime
import ipaddress
import socket
import ssl

import httpx
import pytest

pytest.importorskip("cryptography")
pytest.importorskip("openai")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from openai import AsyncOpenAI, OpenAI

from forge.config import ConfigError, build
from forge_agents.address import AddressConfig
from forge_agents.config import AgentConfig
from forge_agents.settings import SessionSettings
from forge_http.web import bind

from .test_recipe import chat, run

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A certificate of 127.0.0.1 and its key."""
    folder = tmp_path_factory.mktemp("certificate")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gateway")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    text = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(encoding))
    (folder / "key.pem").write_bytes(text)
    return {"certificate": str(folder / "certificate.pem"), "private_key": str(folder / "key.pem")}


@pytest.fixture
def remote(served, files):
    """A session of a gateway that listens by TLS as well: its URL, its key, and the gateway."""
    gateway, run_there = served
    address = AddressConfig(listen="127.0.0.1:0", **files)
    listening = gateway.listen_by_tls(bind("127.0.0.1", 0), address.context(), address.name)
    url = run_there(listening.__aenter__())

    async def opened():
        return gateway.open(SessionSettings())

    yield url, run_there(opened()).key, gateway
    run_there(listening.__aexit__(None, None, None))


def test_a_client_speaks_tls_and_its_tokens_are_in_the_session(remote, served, files, forced_policy):
    url, key, gateway = remote
    assert url.startswith("https://")
    trusted = ssl.create_default_context(cafile=files["certificate"])
    with OpenAI(base_url=f"{url}/v1", api_key=key, http_client=httpx.Client(verify=trusted), max_retries=0) as client:
        messages = [{"role": "user", "content": "who jumps?"}]
        whole = client.chat.completions.create(model="policy", messages=messages)
        stream = client.chat.completions.create(model="policy", messages=messages, stream=True)
        pieces = [piece.choices[0].delta.content or "" for piece in stream if piece.choices]
    assert whole.usage.completion_tokens > 0
    assert len(pieces) > 1
    record = served[1](gateway.close(key))
    assert len(record.runs["policy"]) == 2


def test_others_get_nothing(remote, files):
    url, key, gateway = remote
    body = {"model": "policy", "messages": [{"role": "user", "content": "who jumps?"}]}
    headers = {"Authorization": f"Bearer {key}"}
    plain = url.replace("https://", "http://")
    with pytest.raises(httpx.HTTPError):
        httpx.post(f"{plain}/v1/chat/completions", json=body, headers=headers)
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers)
    with httpx.Client(verify=ssl.create_default_context(cafile=files["certificate"])) as client:
        wrong = client.post(f"{url}/v1/chat/completions", json=body, headers={"Authorization": "Bearer " + "0" * 32})
        assert wrong.status_code == 401
        elsewhere = client.post(f"{url}/v1/chat/completions", json=body, headers={**headers, "Host": "example.org"})
        assert elsewhere.status_code == 403
        # Connections that never finish their handshake: more than may wait for theirs at once.
        silent = [socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) for _ in range(200)]
        assert client.post(f"{url}/v1/chat/completions", json=body, headers=headers).status_code == 200
        assert httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers).status_code == 200
        for connection in silent:
            connection.close()


@pytest.mark.full
def test_a_run_whose_agents_are_elsewhere(tmp_path, files):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def play(client, sample, address):
        """As a program on another machine that has the address and the key."""
        assert address == f"https://127.0.0.1:{port}"
        http = httpx.AsyncClient(verify=ssl.create_default_context(cafile=files["certificate"]))
        async with AsyncOpenAI(base_url=f"{address}/v1", api_key=client.api_key, http_client=http) as remote_client:
            return await chat(remote_client, sample)

    metrics = run(tmp_path, {"function": play, "address": {"listen": f"127.0.0.1:{port}", **files}})
    assert all(row.get("episode/unscored", 0) == 0 for row in metrics)
    assert {row["episode/turns"] for row in metrics if "episode/turns" in row} == {2}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"listen": "0.0.0.0"}, r"address\.listen must be a host and a port, as 0\.0\.0\.0:8443, got '0\.0\.0\.0'"),
        ({"listen": "host:x"}, r"address\.listen must be a host and a port"),
        ({"url": "http://gateway:8443"}, r"address\.url must be like https://"),
        ({"url": "https://gateway:8443/v1"}, r"address\.url must be like https://"),
        ({"certificate": "absent.pem"}, r"absent\.pem and .* are no certificate with its key"),
        ({"certificate": __file__}, r"are no certificate with its key"),
    ],
)
def test_an_address_that_does_not_work_is_one_line(files, changes, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        build(AgentConfig, {"function": chat, "address": {"listen": "127.0.0.1:0", **files, **changes}})
    assert "\n" not in str(caught.value)
