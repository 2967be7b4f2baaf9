"""What becomes of a generator whose engine fails."""

import os

import pytest

from forge.actors import Generator
from forge.runtime.controller import endpoint

pytestmark = pytest.mark.processes


class Sabotaged(Generator):
    """Its engine can be broken from outside."""

    @endpoint
    async def sabotage(self) -> None:
        self.engine._batch.decoder = None

    @endpoint
    async def pid(self) -> int:
        return os.getpid()


@pytest.mark.full
async def test_call_on_killed_generator_replica_is_retried_on_another(model):
    policy = await Sabotaged.options(num_replicas=2).as_service(model, slots=4, max_tokens=4)
    before = await policy.pid.fanout()
    async with policy.session():
        lost = await policy.pid.route()
        await policy.sabotage.route()
        completion = await policy.generate.route("abc>", seed=1)
    assert completion.token_ids == (await policy.generate.route("abc>", seed=1)).token_ids
    after = await policy.pid.fanout()
    assert lost in before
    assert lost not in after
    assert len({*after}) == 2


async def test_stop_tokens_of_generator_constructor_end_completions(model):
    policy = await Generator.options().as_service(model, slots=4, max_tokens=16, stop_token_ids=tuple(range(3, 30)))
    completion = await policy.generate.route("abc>", seed=1, temperature=5.0)
    assert (completion.finish, len(completion.token_ids)) == ("stop", 1)
    several = await policy.generate.route("abc>", seed=1, temperature=5.0, stop_token_ids=())
    assert len(several.token_ids) > 1
    for update in (policy.update_weights, policy.update):
        with pytest.raises(ValueError, match=r"no weight store .*: start it with store=VersionStore\.create\(\)"):
            await update.fanout(1)
