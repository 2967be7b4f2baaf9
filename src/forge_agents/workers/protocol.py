"""The far end of a worker's pipes: answers requests, each one JSON object on a line.

Requests: {"id", "op": "open" | "rows" | "play", "timeout": seconds, ...}. Answers: {"id", "result": {...}}, or {"id",
"error": text, "setting": whether a setting is at fault}. Standard input ends with the controller, and the worker with
it. Python 3.11 or newer, the standard library only.
"""

import asyncio
import itertools
import json
import os
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol, TextIO

Values = dict[str, Any]  # plain JSON
MAX_LINE = 1 << 30  # bytes of a message: all rows are one
CLOSING = 5.0  # seconds that a collection may take to close


class SettingError(Exception):
    """A setting that is invalid here, such as an environment that is not installed: the run cannot start."""


class EpisodeError(Exception):
    """A failure of the environment in one episode, in its words."""


class Collection(Protocol):
    """An environment of a collection."""

    def rows(self) -> Iterable[tuple[str, Values]]:
        """Return the tasks, each with its split, "train" or "eval", as {"question", "answer"}."""

    async def play(self, task: Values, url: str, model: str) -> Values:
        """Play and score one episode: {"reward", "stop", "metrics"}.

        Args:
            task: the `answer` of a row.
            url: the address of the episode's model, to which /v1 is added.
        """

    async def close(self) -> None:
        """Free all resources."""


Opener = Callable[[str, Values], Awaitable[Collection]]


def serve_collection(opener: Opener) -> None:
    """Answer requests until standard input ends.

    Args:
        opener: opens an environment by its name and arguments.
    """
    # What the collection prints must not look like a message.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    threading.Thread(target=_end_after_parent, args=(os.getppid(),), daemon=True).start()
    asyncio.run(_Server(opener, answers).run(requests))


def _end_after_parent(parent: int) -> None:
    """End this process after its parent, even if its loop hangs and does not see the end of its input."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(2 * CLOSING)
    os._exit(1)


class _Server:
    """The requests that are being answered."""

    def __init__(self, opener: Opener, answers: TextIO) -> None:
        self.opener, self.answers = opener, answers
        self.collection: Collection | None = None

    async def run(self, requests: TextIO) -> None:
        """Serve requests until the input ends, then cancel the running ones."""
        reader = asyncio.StreamReader(limit=MAX_LINE)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests)
        running = set()
        # What is opened is closed by the same task, as cancel scopes of anyio demand.
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
        answer: Values
        try:
            async with asyncio.timeout(timeout):
                answer = {"result": await self._compute_result(**request)}
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
        if op == "open":  # the first request
            self.collection = await self.opener(fields["environment"], fields["args"])
            return {}
        assert self.collection is not None, f"{op} came before open"
        if op == "play":
            return await self.collection.play(**fields)
        # Nothing is read, or downloaded, of which no row is wanted.
        limit = None if fields["limit"] < 0 else fields["limit"]
        return {"rows": [*itertools.islice(self.collection.rows(), limit)]}
