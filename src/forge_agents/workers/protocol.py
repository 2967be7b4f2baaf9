"""The worker's side of `forge_agents.collection.Worker`: answers requests, each one JSON object on a line.

A request is {"id", "op": "open" | "rows" | "play", "timeout": seconds, ...}. Its answer is {"id", "result": {...}}, or
{"id", "error": text, "setting": whether a setting is at fault}. Requests arrive on standard input; when that ends,
because the controller has closed it or has died, the worker exits.

This module is run by the collection's Python, 3.11 or newer, and uses only the standard library.
"""

import asyncio
import itertools
import json
import os
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, TextIO

Values = dict[str, Any]  # plain JSON
MAX_LINE = 1 << 30  # bytes of a message; the rows of a collection are sent in one message
CLOSING = 5.0  # seconds that a collection may take to close


class SettingError(Exception):
    """A setting is invalid on this machine, such as an environment that is not installed: the run cannot start."""


class EpisodeError(Exception):
    """The environment failed in one episode; the message is the environment's."""


def serve_collection(opener: Callable[[str, Values], Awaitable[Any]]) -> None:
    """Answer requests on standard input by standard output until the input ends.

    Args:
        opener: returns the opened environment of a collection for a name and arguments. Its method `rows` returns pairs
            of the split, "train" or "eval", and the row {"question": text, "answer": task}; its coroutine
            `play(task, url, model)` plays and scores one episode at the address of the model without /v1, and returns
            {"reward", "stop", "metrics"}; its coroutine `close` ends its processes.
    """
    # What the collection prints must not be read as an answer: its standard output becomes standard error, and its
    # standard input is empty.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    threading.Thread(target=_end_after_parent, args=(os.getppid(),), daemon=True).start()
    asyncio.run(_Server(opener, answers).run(requests))


def _end_after_parent(parent: int) -> None:
    """Wait until the parent process has died, and exit then, even if the event loop hangs."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(2 * CLOSING)
    os._exit(1)


class _Server:
    """Server that answers requests concurrently with one opened collection."""

    def __init__(self, opener: Callable[[str, Values], Awaitable[Any]], answers: TextIO) -> None:
        self.opener, self.answers = opener, answers
        self.collection: Any = None

    async def run(self, requests: TextIO) -> None:
        """Answer requests until the input ends, then cancel the unfinished ones and close the collection."""
        reader = asyncio.StreamReader(limit=MAX_LINE)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests)
        running = set()
        # The first request opens the collection. It is answered by this task, which also closes the collection: anyio's
        # cancel scopes must be left by the task that has entered them.
        await self._answer_request(**json.loads(await reader.readline()))
        while line := await reader.readline():
            task = asyncio.create_task(self._answer_request(**json.loads(line)))
            running.add(task)
            task.add_done_callback(running.discard)
        for task in running:
            task.cancel()
        if self.collection is not None:
            async with asyncio.timeout(CLOSING):
                await self.collection.close()

    async def _answer_request(self, id: int, timeout: float, **request: Any) -> None:
        try:
            async with asyncio.timeout(timeout):
                answer: Values = {"result": await self._compute_result(**request)}
        except TimeoutError:
            answer = {"error": f"no result of {request['op']!r} within {timeout:g} s", "setting": False}
        except (SettingError, EpisodeError) as error:
            answer = {"error": str(error), "setting": isinstance(error, SettingError)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}", "setting": False}
        self.answers.write(json.dumps({"id": id, **answer}) + "\n")
        self.answers.flush()

    async def _compute_result(self, op: str, **fields: Any) -> Values:
        if op == "open":
            self.collection = await self.opener(fields["environment"], fields["args"])
            return {}
        assert self.collection is not None, f"{op} came before open"
        if op == "play":
            return await self.collection.play(**fields)
        # With limit 0, which only checks that the collection can be opened, no row is read or downloaded.
        limit = None if fields["limit"] < 0 else fields["limit"]
        return {"rows": [*itertools.islice(self.collection.rows(), limit)]}
