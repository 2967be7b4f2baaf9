"""Sessions: what cells answer, their limits between cells, and children of a cell that meddle with later ones."""

from __future__ import annotations

import asyncio
import os
import textwrap
import time

import pytest

from .conftest import SELF, opened
from .test_sandbox import below, each_level

pytestmark = pytest.mark.processes

# For a cell: the socket that its session answers by.
CHANNEL = """
import os, socket, time
def channel():
    for number in range(3, 64):
        try:
            found = socket.socket(fileno=os.dup(number))
            if found.type == socket.SOCK_SEQPACKET:
                return found
        except OSError:
            continue
"""


def cells(sandbox, *texts, **settings):
    """The results of the cells of a session."""

    async def main():
        async with sandbox.session() as python:
            return [await python.run(textwrap.dedent(text), **settings) for text in texts]

    return asyncio.run(main())


@each_level
def test_sessions(level, user, sandboxes):
    sandbox = sandboxes(level, user)

    async def main():
        async with sandbox.session() as python:
            assert (await python.run("x = 1")).stdout == ""
            assert (await python.run("def f():\n    return x + 1\nf()")).stdout == "2\n"
            assert (await python.run("None")).stdout == ""
            result = await python.run("1 / 0")
            assert (result.status, "ZeroDivisionError" in result.stderr) == ("error", True)
            assert (await python.run("y = (")).status == "error"
            assert (await python.run("print('no end', end='')\n'ä'")).stdout == "no end'ä'\n"
            assert (await python.run(f"z = {'1' * 200_000!r}\nlen(z)")).stdout == "200000\n"
            assert (await python.run("x")).status == "ok"
            result = await python.run("while True: pass", time_limit=0.2)
            assert result.status == "timeout"
            result = await python.run("x")
            assert (result.status, "timeout" in result.stderr) == ("ended", True)

    asyncio.run(main())


def test_what_ends_a_session(sandboxes):
    sandbox = sandboxes("namespaces", SELF)

    async def main():
        for cell, status in (
            ("exit(3)", "error"),
            ("import os; os._exit(0)", "ok"),
            ("bytearray(10 << 30)", "memory"),
            ("print('x' * 10 ** 6)", "output"),
        ):
            async with sandbox.session() as python, sandbox.session() as other:
                assert (await python.run(cell)).status == status
                assert (await python.run("1")).status == "ended"
                assert (await other.run("1")).status == "ok"

    asyncio.run(main())


GREEDY = """
import os, time
for _ in range(4):
    if not os.fork():
        time.sleep(0.3)
        held = bytearray(b"x") * (100 << 20)
        time.sleep(600)
        os._exit(0)
"""
BUSY = """
import os
for _ in range(3):
    if not os.fork():
        while True:
            pass
"""


@each_level
@pytest.mark.parametrize(
    ("cell", "limit"),
    [pytest.param(GREEDY, "memory_mb (256)", id="memory"), pytest.param(BUSY, "cpu_seconds (2)", id="cpu")],
)
def test_limits_hold_between_cells(cell, limit, level, user):
    sandbox = opened(level, user, workers=1, memory_mb=256, cpu_seconds=2)

    async def main():
        async with sandbox.session() as python, sandbox.session() as other:
            assert (await python.run("1")).status == (await other.run("1")).status == "ok"  # both have begun
            idle = below(os.getpid())
            assert (await python.run(cell)).status == "ok"
            until = time.monotonic() + 60.0
            while below(os.getpid()) - idle and time.monotonic() < until:  # no cell is run meanwhile
                await asyncio.sleep(0.05)
            assert not below(os.getpid()) - idle
            for _ in range(2):
                result = await python.run("1")
                assert (result.status, result.stdout) == ("ended", "")
                wanted = f"the session is over: between two cells its processes exceeded {limit}"
                assert result.stderr == wanted
            assert (await other.run("1")).stdout == "1\n"
        await sandbox.close()

    asyncio.run(main())


@each_level
def test_a_child_of_a_cell_does_not_answer_for_the_next(level, user, sandboxes):
    returns = """
        import os, time
        if not os.fork():
            time.sleep(0.2)
            1 / 0
    """
    answers = """
        import sys
        ready, told = os.pipe()
        if not os.fork():
            mark = os.read(ready, 64)
            for message in (b"1", mark + b"1", mark + b"m", b"x" * 64):
                channel().send(message)
            time.sleep(60)
        """
    wait = "import time\ntime.sleep(0.5)\n'right'"
    # Even the mark of the next cell is of no use to it.
    tells = "os.write(told, sys._getframe(2).f_locals['mark'])\n" + wait
    for first, second in ((returns, wait), (CHANNEL + textwrap.dedent(answers), tells)):
        results = cells(sandboxes(level, user), first, second, "1 / 0")
        assert [result.status for result in results] == ["ok", "ok", "error"]
        assert "'right'" in results[1].stdout


@each_level
def test_a_cell_does_not_answer_for_the_next(level, user, sandboxes):
    """Not even by the session's own process."""
    twice = """
        import gc, sys
        mark = sys._getframe(2).f_locals["mark"]
        for answer in (b"0", b"0", b"1"):
            channel().send(mark + answer)
            channel().send(answer)
    """
    for cell, status in (("1 / 0", "error"), ("import time; time.sleep(0.3)", "ok")):
        results = cells(sandboxes(level, user), CHANNEL + textwrap.dedent(twice), cell)
        assert [result.status for result in results] == ["ok", status]


@each_level
def test_descriptors_sent_with_answers_are_not_received(level, user, sandboxes):
    many = """
        for _ in range(5):
            socket.send_fds(channel(), [b"x" * 17], [0, 1, 2])
    """
    results = cells(sandboxes(level, user), CHANNEL + textwrap.dedent(many), "1")
    assert [result.status for result in results] == ["ok", "ok"]
