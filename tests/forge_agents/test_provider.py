"""Models that are served elsewhere: the provider here is a second gateway over a tiny model."""

import socket
import threading

import anthropic
import httpx
import openai
import pytest

from forge_agents.provider import Provider
from forge_agents.settings import SessionSettings
from forge_http.addresses import join_address
from tests.forge_envs.core.conftest import bpe, small_model  # noqa: F401

from .conftest import serving

KEY = "TEST_PROVIDER_KEY"
SETTINGS = {"max_tokens": 1000, "max_turn_tokens": 24, "seed": 1}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def forwarding(served, forced_policy, bpe, monkeypatch):  # noqa: F811
    """A gateway that forwards the model `gpt` to another one, with the provider's session."""
    forced_policy.script = lambda prompt: "Done."
    provider, run = served
    account = provider.open(SessionSettings(**SETTINGS, max_turns=20))
    monkeypatch.setenv(KEY, account.key)
    providers = {"gpt": Provider(account.url, KEY, "policy"), "gone": Provider(unused_address())}
    with serving(forced_policy, bpe, providers=providers) as (gateway, run_here):
        access = gateway.open(SessionSettings(**SETTINGS))
        yield gateway, access, lambda: run(provider.close(account.key)), lambda: run_here(gateway.close(access.key))


def unused_address():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return "http://" + join_address(*unused.getsockname())


def test_clients_of_each_dialect_reach_the_provider(forwarding):
    access = forwarding[1]
    with openai.OpenAI(base_url=f"{access.url}/v1", api_key=access.key, max_retries=0) as client:
        answer = client.chat.completions.create(model="gpt", messages=HELLO)
        assert answer.choices[0].message.content == "Done."
        with client.chat.completions.stream(model="gpt", messages=HELLO) as stream:
            assert stream.get_final_completion().choices[0].message.content == "Done."
        assert client.responses.create(model="gpt", input="hello").output_text == "Done."
        assert [model.id for model in client.models.list()] == ["policy", "gpt", "gone"]
        own = client.chat.completions.create(model="policy", messages=HELLO)
        assert own.choices[0].message.content == "Done."
    with anthropic.Anthropic(base_url=access.url, api_key=access.key, max_retries=0) as client:
        message = client.messages.create(model="gpt", max_tokens=100, messages=HELLO)
        assert message.content[0].text == "Done."
        assert client.messages.count_tokens(model="gpt", messages=HELLO).input_tokens > 0


def test_a_provider_that_does_not_answer_is_a_503(forwarding):
    gateway, access, *_ = forwarding
    body = {"model": "gone", "messages": HELLO}
    headers = {"Authorization": f"Bearer {access.key}"}
    answer = httpx.post(f"{access.url}/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 503
    assert answer.headers["Retry-After"]
    assert "the provider of gone does not answer" in answer.json()["error"]["message"]
    assert gateway.sessions[access.key].forwarded == 0


HALF = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n6\r\ndata: \r\n"
REDIRECT = b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:9/v1\r\nContent-Length: 0\r\n\r\n"


@pytest.fixture
def answered(forced_policy, bpe):  # noqa: F811
    """A client's request, forwarded to a provider that sends these bytes and closes."""

    def ask(data):
        def send():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(data)

        with socket.create_server(("127.0.0.1", 0)) as listener:
            provider = Provider("http://" + join_address(*listener.getsockname()))
            with serving(forced_policy, bpe, providers={"gpt": provider}) as (gateway, _):
                access = gateway.open(SessionSettings(**SETTINGS))
                sending = threading.Thread(target=send)
                sending.start()
                try:
                    body = {"model": "gpt", "messages": HELLO}
                    headers = {"Authorization": f"Bearer {access.key}"}
                    return httpx.post(f"{access.url}/v1/chat/completions", json=body, headers=headers)
                finally:
                    sending.join()

    return ask


def test_an_answer_that_breaks_off_is_not_complete(answered):
    with pytest.raises(httpx.RemoteProtocolError):
        answered(HALF)


def test_a_key_does_not_follow_a_redirect(answered):
    answer = answered(REDIRECT)
    assert answer.status_code == 307
    assert "Location" not in answer.headers
