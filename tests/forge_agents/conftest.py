"""A gateway whose model is a script, and a gateway over a tiny model, with the clients of the vendors in front."""

import asyncio
import threading
from contextlib import contextmanager

import pytest

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

from benchmarks.scripted_gateway import ScriptedGateway  # noqa: E402
from tests.envs.conftest import bpe, small_model  # noqa: E402, F401


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


@pytest.fixture(scope="module")
def forced_policy(bpe, small_model):  # noqa: F811
    """The tiny model, whose turns a test may force."""
    from .policy import ForcedPolicy

    policy = ForcedPolicy(small_model, bpe)
    yield policy
    policy.close()


@contextmanager
def serving(policy, tokenizer, journal=None, **dialogue):
    """A `Gateway` in a thread; yields it with a function that runs its coroutines there."""
    from forge.envs.dialogue import Dialogue
    from forge.system.web import bind
    from forge_agents.gateway import Gateway
    from forge_agents.policies import Policy

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    dialogue = Dialogue(tokenizer, **({"template": "chatml"} | dialogue))
    gateway = Gateway({"policy": Policy(policy, dialogue, sampling={"temperature": 1.0})}, journal)

    def run(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(120)

    listening = gateway.listen(bind("127.0.0.1", 0))
    run(listening.__aenter__())
    try:
        yield gateway, run
    finally:
        run(listening.__aexit__(None, None, None))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@pytest.fixture
def served(forced_policy, bpe):  # noqa: F811
    forced_policy.script = None
    forced_policy.sampled = 0
    with serving(forced_policy, bpe) as pair:
        yield pair
