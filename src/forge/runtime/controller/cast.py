"""One message of a fanout for all light replicas of a process, in place of one each."""

from __future__ import annotations

import asyncio
import pickle
from typing import TYPE_CHECKING, Any

import cloudpickle

from .actor_host import Answer
from .request import Request

if TYPE_CHECKING:
    from .replica import Replica

# The answers of a process are fetched together: at once when the last is there, else those that are there after
# SOONEST seconds, after twice that time, and so on, at least every LATEST seconds.
SOONEST, LATEST = 0.05, 0.5


class Cast:
    """The replicas that a fanout is sent to within one turn of the event loop are reached by a message to one of their
    process, which serves all of them. Every replica has its own copy of the arguments, and an answer of its own."""

    def __init__(self) -> None:
        self._waiting: dict[object, list[tuple[Replica, Request, asyncio.Future[Answer]]]] = {}
        self._serving: set[asyncio.Task] = set()

    def send(self, replica: Replica, request: Request) -> asyncio.Future[Answer]:
        """The replica's answer."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        if replica.group not in self._waiting:
            loop.call_soon(self._post, replica.group)
        self._waiting.setdefault(replica.group, []).append((replica, request, answer))
        return answer

    def _post(self, group: object) -> None:
        sent = [one for one in self._waiting.pop(group) if not one[2].done()]
        if not sent:
            return
        task = asyncio.get_running_loop().create_task(_serve(sent))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        for _, _, answer in sent:
            # Each answer has its own time limit. After the last, nothing is waited for.
            answer.add_done_callback(lambda _: all(one[2].done() for one in sent) and task.cancel())


async def _serve(sent: list[tuple[Replica, Request, asyncio.Future[Answer]]]) -> None:
    """Have the answers of these replicas, which live in one process, set as they come."""
    replica, request, _ = sent[0]
    host: Any = replica.actor_host
    answers = {own.token: answer for _, own, answer in sent}
    wait = SOONEST
    try:
        payload = cloudpickle.dumps((request.args, request.kwargs))
        calls = [(other.number, own.token, own.id) for other, own, _ in sent]
        arrived = await host.invoke_each.call_one(calls, request.endpoint, payload, wait).as_asyncio()
        while True:
            for token, answer in arrived[1].items():
                if not answers[token].done():
                    answers[token].set_result(pickle.loads(answer))
            left = [token for token, answer in answers.items() if not answer.done()]
            if not left:
                return
            wait = min(2 * wait, LATEST)
            arrived = await host.fetch.call_one(left, wait).as_asyncio()
    except Exception as error:
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(error)
