"""Batch the messages of a fanout: one for all light replicas of a process, in place of one each."""

from __future__ import annotations

import asyncio
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle

from .actor_host import Answer
from .request import Request

if TYPE_CHECKING:
    from .replica import Replica

# The answers of a process are fetched together: all of them at once when the last is ready, otherwise those that are
# ready after MIN_FETCH_INTERVAL seconds, after twice that time, and so on, at least every MAX_FETCH_INTERVAL seconds.
# A short first interval lets quick answers through; the cap bounds how long a ready answer waits for slow ones.
MIN_FETCH_INTERVAL = 0.05
MAX_FETCH_INTERVAL = 0.5


class CastCall(NamedTuple):
    """A call of one replica, and the future of its answer."""

    replica: Replica
    request: Request
    reply: asyncio.Future[Answer]


class Cast:
    """Replicas of one process that a fanout addresses in the same tick of the event loop share one message. Every
    replica still has its own copy of the arguments and its own answer."""

    def __init__(self) -> None:
        self._waiting: dict[object, list[CastCall]] = {}  # by process group
        self._serving: set[asyncio.Task] = set()

    def send(self, replica: Replica, request: Request) -> asyncio.Future[Answer]:
        """Send a request with the next message to the replica's process; the future is its answer."""
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Answer] = loop.create_future()
        # The first request for a process posts the message in the next tick, when all others have joined it.
        if replica.group not in self._waiting:
            loop.call_soon(self._post, replica.group)
        self._waiting.setdefault(replica.group, []).append(CastCall(replica, request, reply))
        return reply

    def _post(self, group: object) -> None:
        calls = [call for call in self._waiting.pop(group) if not call.reply.done()]
        if not calls:
            return
        task = asyncio.get_running_loop().create_task(_serve(calls))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        for call in calls:
            # Each answer has its own time limit. After the last, nothing is waited for.
            call.reply.add_done_callback(lambda _: all(call.reply.done() for call in calls) and task.cancel())


async def _serve(calls: list[CastCall]) -> None:
    """Send the calls of replicas that share a process, and set their answers as they arrive."""
    first = calls[0]
    host: Any = first.replica.actor_host
    answers = {call.request.token: call.reply for call in calls}
    interval = MIN_FETCH_INTERVAL
    try:
        payload = cloudpickle.dumps((first.request.args, first.request.kwargs))
        addresses = [(call.replica.number, call.request.token, call.request.id) for call in calls]
        message = host.invoke_each.call_one(addresses, first.request.endpoint, payload, interval)
        _, arrived = await message.as_asyncio()
        while True:
            for token, pickled in arrived.items():
                # Its caller may have stopped waiting meanwhile.
                if not answers[token].done():
                    answers[token].set_result(pickle.loads(pickled))
            pending = [token for token, reply in answers.items() if not reply.done()]
            if not pending:
                return
            interval = min(2 * interval, MAX_FETCH_INTERVAL)
            _, arrived = await host.fetch.call_one(pending, interval).as_asyncio()
    except Exception as error:
        # The message itself failed, as when the process died: every caller learns it.
        for reply in answers.values():
            if not reply.done():
                reply.set_exception(error)
