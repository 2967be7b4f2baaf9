"""Boards: keys and values by which the ranks of a process group meet, stored by the first rank's daemon."""

from __future__ import annotations

import asyncio

from .wire import Json, Message, receive, send

SCHEME = "board://"  # of the address of a board: board://HOST:PORT/NAME


class Boards:
    """The boards of one daemon. A board is created by the first rank that names it, and deleted when the last rank
    disconnects."""

    def __init__(self) -> None:
        self._boards: dict[str, dict[str, str]] = {}
        self._users: dict[str, int] = {}
        self._changed = asyncio.Condition()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one rank until it closes its connection."""
        opening = await receive(reader)
        if opening is None:
            return
        name = opening["board"]
        values = self._boards.setdefault(name, {})
        self._users[name] = self._users.get(name, 0) + 1
        try:
            while (request := await receive(reader, timeout=None)) is not None:
                send(writer, await self._answer(values, request))
                await writer.drain()
        # The last rank that leaves takes the board with it: the next attempt to train begins with an empty one.
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name], self._boards[name]

    async def _answer(self, values: dict[str, str], request: Message) -> dict[str, Json]:
        key = request.get("key", "")
        async with self._changed:
            # The operations of torch.distributed.Store.
            match request["do"]:
                case "set":
                    values[key] = request["value"]
                case "add":
                    values[key] = str(int(values.get(key, "0")) + request["value"])
                case "compare_set":
                    current = values.get(key)
                    # As torch's stores do: a missing key counts as equal to an empty expectation.
                    if current == request["expected"] or (current is None and not request["expected"]):
                        values[key] = request["value"]
                    elif current is None:
                        return {"ok": request["expected"]}
                case "delete":
                    return {"ok": values.pop(key, None) is not None}
                case "count":
                    return {"ok": len(values)}
                case "check":
                    return {"ok": all(name in values for name in request["keys"])}
                case "wait":
                    try:
                        async with asyncio.timeout(request["timeout"]):
                            await self._changed.wait_for(lambda: all(name in values for name in request["keys"]))
                    except TimeoutError:
                        absent = [name for name in request["keys"] if name not in values]
                        return {"error": f"no rank has written {', '.join(absent)} within {request['timeout']:g} s"}
                    return {"ok": [values[name] for name in request["keys"]]}
                case unknown:
                    return {"error": f"unknown request {unknown!r}"}
            self._changed.notify_all()
            return {"ok": values[key]}
