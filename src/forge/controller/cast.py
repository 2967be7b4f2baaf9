"""One message of a fanout for all light replicas of a process, in place of one each."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import cloudpickle

from .actor_host import Answer
from .request import Request

if TYPE_CHECKING:
    from .replica import Replica


class Cast:
    """The replicas that a fanout is sent to within one turn of the event loop are reached by a message to one of their
    process, which serves all of them. Every replica has its own copy of the arguments, and an answer of its own; they
    come when the last is there."""

    def __init__(self) -> None:
        self._waiting: dict[object, list[tuple[Replica, Request, asyncio.Future[Answer]]]] = {}

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
        replica, request, _ = sent[0]
        calls = [(other.number, own.token, own.id) for other, own, _ in sent]
        post: Any = replica.actor_host.invoke_each
        try:
            payload = cloudpickle.dumps((request.args, request.kwargs))
            arriving = post.call_one(calls, request.endpoint, payload).as_asyncio()
        except Exception as error:
            for _, _, answer in sent:
                answer.set_exception(error)
            return
        arriving.add_done_callback(lambda arrived: _deliver(arrived, [answer for _, _, answer in sent]))


def _deliver(arrived: asyncio.Future[tuple[int, list[Answer]]], answers: list[asyncio.Future[Answer]]) -> None:
    if arrived.cancelled():
        for answer in answers:
            answer.cancel()
        return
    error = arrived.exception()
    for number, answer in enumerate(answers):
        if answer.done():
            continue
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(arrived.result()[1][number])
