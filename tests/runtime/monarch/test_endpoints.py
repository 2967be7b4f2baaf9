"""Monarch's own decorators in components: the same answers as on Monarch's actors."""

from __future__ import annotations

import asyncio

import pytest

from forge.runtime.controller import CallTimeout, run, shutdown
from tests.runtime.monarch.components import Mailbox


async def exercise(mailbox) -> None:
    """Call every endpoint of a mailbox."""
    # A reader that waits does not keep the mailbox's thread from the writer.
    reader = asyncio.create_task(mailbox.get.call_one())
    await asyncio.sleep(0)
    assert await mailbox.put.call_one("first") in (0, 1)
    assert await reader == "first"
    assert await mailbox.put.call_one("second") == 1
    assert await mailbox.get.call_one() == "second"
    assert await asyncio.gather(*(mailbox.meet.call_one(5) for _ in range(5))) == [5] * 5
    with pytest.raises(KeyError, match="gone"):
        await mailbox.fail.call_one("gone")
    # The first answer counts, and work after it is finished.
    assert await mailbox.early.call_one(3) == 3
    assert await mailbox.get.call_one() == "after 3"
    for wrapped in (False, True):
        with pytest.raises(PermissionError, match="not today"):
            await mailbox.deny.call_one(wrapped)
    with pytest.raises(ValueError, match="broken"):
        await mailbox.broken.call_one(before=True)
    assert await mailbox.broken.call_one(before=False) == "sent"
    with pytest.raises(CallTimeout, match=r"(?i)mailbox.*silent"):
        await mailbox.silent.options(timeout=0.3).call_one()
    assert await mailbox.put.call_one("last") == 1


@pytest.mark.processes
def test_monarchs_decorators_in_a_service():
    async def main() -> None:
        mailbox = await Mailbox.as_actor()
        async with asyncio.timeout(60):
            await exercise(mailbox)
        assert mailbox.status().restarts == 0
        assert await mailbox.get.fanout() == ["last"]

    run(main())


def test_monarchs_decorators_in_this_process():
    async def main() -> None:
        try:
            async with asyncio.timeout(60):
                await exercise(await Mailbox.as_local())
        finally:
            await shutdown()

    asyncio.run(main())


@pytest.mark.processes
def test_ranks_answer_through_a_port_each():
    async def main() -> None:
        mailbox = await Mailbox.options(procs=2).as_actor()
        assert await mailbox.early.call(7) == [7, 7]

    run(main())
