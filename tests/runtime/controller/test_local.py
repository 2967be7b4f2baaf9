"""Components in the controller's own process."""

import asyncio

import pytest

from forge.runtime.controller import ForgeActor, endpoint, shutdown


class Exhausted(ForgeActor):
    """Its data has ended."""

    @endpoint
    def following(self) -> int:
        return next(iter(()))


def test_an_exhausted_iterator_is_not_waited_for():
    async def main() -> None:
        exhausted = await Exhausted.as_local()
        try:
            await asyncio.wait_for(exhausted.following.route(), 10)
        finally:
            await shutdown()

    with pytest.raises(RuntimeError, match="it raised StopIteration: the iterator is exhausted"):
        asyncio.run(main())
