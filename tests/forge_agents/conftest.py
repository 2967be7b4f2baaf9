"""A gateway whose model is a script, and the clients of the vendors in front of it."""

import pytest

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

from benchmarks.scripted_gateway import ScriptedGateway  # noqa: E402


@pytest.fixture(scope="module")
def address():
    """The gateway and its URL, for all tests of a module."""
    gateway = ScriptedGateway(lambda request: [])
    with gateway.serve() as url:
        yield gateway, url


@pytest.fixture
def gateway(address):
    gateway, _ = address
    gateway.failure = None
    gateway.requests.clear()
    gateway.bodies.clear()
    return gateway


@pytest.fixture
def gpt(address):
    with openai.OpenAI(base_url=f"{address[1]}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def claude(address):
    with anthropic.Anthropic(base_url=address[1], api_key="none", max_retries=0, timeout=60) as client:
        yield client
