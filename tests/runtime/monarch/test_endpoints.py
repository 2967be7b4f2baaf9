"""Monarch's own decorators in components: the same answers as on Monarch's actors."""

import asyncio

import pytest

from forge.runtime.controller import shutdown
from tests.runtime.monarch.components import Mailbox


async def exercise(mailbox) -> None:
    assert await mailbox.put.call_one("first") == 1
    assert await asyncio.gather(*(mailbox.meet.call_one(5) for _ in range(5))) == [5] * 5
    with pytest.raises(KeyError, match="gone"):
        await mailbox.fail.call_one("gone")


@pytest.mark.processes
async def test_monarch_decorated_endpoints_work_in_forge_service():
    mailbox = await Mailbox.as_actor()
    await exercise(mailbox)
    assert mailbox.status().restarts == 0


async def test_monarch_decorated_endpoints_work_in_local_actor():
    try:
        await exercise(await Mailbox.as_local())
    finally:
        await shutdown()
