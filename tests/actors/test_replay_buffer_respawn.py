"""A replay buffer that is killed at any moment is the buffer that never was: same items, same answers, same counts."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.actors import ReplayBuffer
from forge.actors.ledger import LISTS, SINGLE
from forge.controller import ActorContext, Unrecoverable
from forge.types import Group
from tests.actors.respawn import request, started
from tests.actors.test_replay_buffer import episode, name

operations = st.one_of(
    st.tuples(st.just("add"), st.integers(-1, 4), st.integers(0, 3)),
    st.tuples(st.just("sample"), st.integers(0, 4), st.integers(1, 3)),
    st.tuples(st.just("expire"), st.integers(0, 4), st.none()),
    st.tuples(st.sampled_from(["save", "load"]), st.none(), st.none()),
)
kills = st.sampled_from(["never", "before", "before the entry was whole", "before the answer", "after the answer"])


def ready(buffer: ReplayBuffer, operation: tuple) -> tuple:
    """A sample that would wait for what never comes becomes an expire."""
    kind, version, size = operation
    oldest = max(version or 0, buffer.contents.version) - 2
    young = [item for item in buffer.contents.items if item.version == -1 or item.version >= oldest]
    return ("expire", version, None) if kind == "sample" and len(young) < size else operation


async def act(buffer: ReplayBuffer, number: int, operation: tuple, saved: dict[str, Any]) -> Any:
    kind, version, size = operation
    if kind == "add" and size == 0:
        return await buffer.add(episode(number, version))
    if kind == "add":
        return await buffer.add(Group([episode(number, version, 1.0 if i < size else None) for i in range(3)], number))
    if kind == "sample":
        return await buffer.sample(version, size)
    if kind == "expire":
        return await buffer.expire(version)
    return await buffer.load_state_dict(saved) if kind == "load" else None


def content(path: Path) -> bytes:
    return path.read_bytes()


def tear(path: Path, before: bytes) -> None:
    """Cut off the end of the last entry, if one was appended."""
    after = path.read_bytes()
    if len(after) > len(before) and after.startswith(before):
        path.write_bytes(after[:-3])


@settings(max_examples=300, deadline=None)
@given(
    history=st.lists(st.tuples(operations, kills), max_size=40),
    order=st.sampled_from(["fifo", "random"]),
    floor=st.sampled_from([0, 2000, 1 << 20]),
)
def test_kills_between_and_within_operations_change_nothing(history: list, order: Any, floor: int):
    async def main(path: Path) -> None:
        def make(incarnation: int) -> ReplayBuffer:
            buffer = ReplayBuffer(1000, max_policy_age=2, order=order, seed=3, journal=str(path))
            buffer.ledger.FLOOR = floor  # type: ignore[misc]
            return started(buffer, incarnation)

        calm, hit = ReplayBuffer(1000, max_policy_age=2, order=order, seed=3), make(0)
        saved = await calm.state_dict()
        for number, (operation, kill) in enumerate(history, 1):
            operation = ready(calm, operation)
            if kill == "before":
                hit = make(number)
            before = content(path)
            expected = await act(calm, number, operation, saved)
            with request(f"request {number}"):
                assert await act(hit, number, operation, saved) == expected
                if kill == "before the entry was whole":
                    tear(path, before)
                if kill.startswith("before the"):
                    hit = make(number)
                    assert await act(hit, number, operation, saved) == expected
            if kill == "after the answer":
                hit = make(number)
            assert await hit.state_dict() == await calm.state_dict()
            assert await hit.counts() == await calm.counts()
            saved = await calm.state_dict() if operation[0] == "save" else saved

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(folder) / "run" / "journal"))


def test_a_repeated_request_is_answered_long_after_and_through_rewrites(tmp_path: Path):
    async def main() -> None:
        path = tmp_path / "journal"
        buffer = started(ReplayBuffer(10_000, order="random", journal=str(path)))
        buffer.ledger.FLOOR = 10_000  # type: ignore[misc]
        for number in range(5):
            with request(f"early {number}"):
                await buffer.add(episode(number))
        with request("sample"):
            taken = await buffer.sample(0, 3)
        sizes = []
        for number in range(SINGLE - 10):
            with request(f"late {number}"):
                await buffer.expire(0)
            sizes.append(path.stat().st_size)
        assert any(b < a for a, b in itertools.pairwise(sizes))
        again = started(ReplayBuffer(10_000, order="random", journal=str(path)), 1)
        for number in range(5):
            with request(f"early {number}"):
                assert await again.add(episode(number)) is True
        with request("sample"):
            assert await again.sample(0, 3) == taken
        assert await again.counts() == await buffer.counts()

    asyncio.run(main())


def test_what_is_remembered_is_bounded(tmp_path: Path):
    ledger = started(ReplayBuffer(journal=str(tmp_path / "journal"))).ledger
    for number in range(SINGLE + 100):
        with request(str(number)):
            ledger.enter(("expire", 0))
            ledger.complete(("expire", 0), 0)
    for number in range(LISTS + 5):
        with request(f"batch {number}"):
            ledger.complete(("take", 0), [])

    def known(name: str) -> bool:
        with request(name):
            return ledger.repeated

    assert [known(str(n)) for n in (0, 99, 100, SINGLE + 99)] == [False, False, True, True]
    assert [known(f"batch {n}") for n in (0, 4, 5, LISTS + 4)] == [False, False, True, True]


def test_requests_that_waited_when_the_process_died_wait_again(tmp_path: Path):
    async def main() -> None:
        def make(incarnation: int) -> ReplayBuffer:
            return started(ReplayBuffer(2, journal=str(tmp_path / "journal")), incarnation)

        async def serve(name: str, call: Any) -> Any:
            with request(name):
                return await call

        first = make(0)
        lost = [asyncio.create_task(serve("sample", first.sample(0, 2))), asyncio.create_task(first.add(episode(0)))]
        await asyncio.sleep(0.01)
        assert [task.done() for task in lost] == [False, True]
        second = make(1)
        again = asyncio.create_task(serve("sample", second.sample(0, 2)))
        await asyncio.sleep(0.01)
        assert not again.done()
        await second.add(episode(1))
        assert [name(item) for item in await again] == [0, 1]
        lost[0].cancel()

    asyncio.run(main())


def test_a_first_process_begins_anew_and_replicas_do_not_share(tmp_path: Path):
    async def main() -> None:
        path = str(tmp_path / "a" / "journal")
        await started(ReplayBuffer(journal=path)).add(episode(0))
        other = ReplayBuffer(journal=path)
        other.context = ActorContext("ReplayBuffer", replica=1)
        other.setup()
        await other.add(episode(1))
        assert (await started(ReplayBuffer(journal=path), 1).counts())["size"] == 1
        assert (await started(ReplayBuffer(journal=path)).counts())["size"] == 0
        assert (await started(ReplayBuffer(journal=path), 1).counts())["size"] == 0

    asyncio.run(main())


def test_without_a_journal_a_loss_is_the_end_and_says_what_to_set(tmp_path: Path):
    with pytest.raises(Unrecoverable, match=r"ReplayBuffer\[0\] was replaced and the items .* journal="):
        started(ReplayBuffer(), 1)
    with pytest.raises(Unrecoverable, match=r"cannot go on from .*gone: .*No such file"):
        started(ReplayBuffer(journal=str(tmp_path / "gone")), 1)
    (tmp_path / "damaged").write_bytes(bytes(100))
    with pytest.raises(Unrecoverable, match="damaged: the record at byte 0"):
        started(ReplayBuffer(journal=str(tmp_path / "damaged")), 1)


def test_requests_without_an_id_are_all_done(tmp_path: Path):
    async def main() -> None:
        buffer = started(ReplayBuffer(journal=str(tmp_path / "journal")))
        for _ in range(2):
            assert await buffer.add(episode(0))
        assert (await started(ReplayBuffer(journal=str(tmp_path / "journal")), 1).counts())["size"] == 2

    asyncio.run(main())
