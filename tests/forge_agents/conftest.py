"""A gateway over a tiny model, whose turns a script may force."""

import asyncio
import threading
from contextlib import contextmanager

import pytest

pytest.importorskip("anthropic")
pytest.importorskip("openai")

from tests.forge_envs.core.conftest import bpe, small_model  # noqa: F401


@pytest.fixture(scope="module")
def forced_policy(bpe, small_model):  # noqa: F811
    """The tiny model, whose turns a test may force."""
    from .policy import ForcedPolicy

    policy = ForcedPolicy(small_model, bpe)
    yield policy
    policy.close()


@contextmanager
def serving(policy, tokenizer, **dialogue):
    """A `Gateway` in a thread; yields it with a function that runs its coroutines there."""
    from forge_agents.gateway import Gateway
    from forge_agents.policies import Policy
    from forge_envs.dialogue import Dialogue
    from forge_http.web import bind_socket

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    dialogue = Dialogue(tokenizer, **({"template": "chatml"} | dialogue))
    gateway = Gateway({"policy": Policy(policy, dialogue, sampling={"temperature": 1.0})})

    def run(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(120)

    listening = gateway.listen(bind_socket("127.0.0.1", 0))
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
