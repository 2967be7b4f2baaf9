"""A run that serves the policy it trains to clients from outside."""

import signal
import time

import openai
import pytest

from tests.forge_agents.serving.conftest import address, interrupted, launched  # noqa: F401 (a fixture)
from tests.recipes.test_recipes import command

pytestmark = [pytest.mark.processes, pytest.mark.full]


def test_a_run_serves_the_policy_that_it_trains(launched, tmp_path):  # noqa: F811
    process = launched(*command(tmp_path, "--serve.port", "0", "--training.steps", "100000"))
    client = openai.OpenAI(base_url=address(process), api_key="none", max_retries=0)
    seen, identities, deadline = set(), {}, time.monotonic() + 60
    while len(seen) < 4:
        assert time.monotonic() < deadline, f"versions {seen}"
        choice = client.completions.create(model="test", prompt="abc>", max_tokens=20).choices[0]
        assert len(choice.versions) == len(choice.token_ids)
        assert choice.versions == sorted(choice.versions), "the policy never becomes older"
        seen.update(choice.versions)
        identities |= choice.weights
    assert len(set(identities.values())) > 1  # a batch without signal leaves the weights as they are
    assert interrupted(process) == 128 + signal.SIGINT
    client.close()
