"""A session that is served: an environment, where its episode stands, and what it answers to OpenEnv's messages."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from forge.envs.environment import Environment, InfrastructureError, Step

from .wire import action_from_json, reply_to_json

log = logging.getLogger(__name__)

Data = dict[str, Any]


class Refused(Exception):
    """An error that is told to the client. `last`: the session ends with it."""

    def __init__(self, code: str, message: str, last: bool = False, **more: Any) -> None:
        super().__init__(message)
        self.data = {"message": message, "code": code, **more}
        self.last = last


class ServedSession:
    """An environment and where its episode stands. Calls come one after the other."""

    def __init__(self, environment: Environment, task: Callable[[int], Any], timeout: float) -> None:
        self.environment, self._task, self._timeout = environment, task, timeout
        self._first: Step | None = None
        self._running, self._steps, self._episode = False, 0, ""
        self._turn = asyncio.Lock()

    @property
    def busy(self) -> bool:
        """A call is under way."""
        return self._turn.locked()

    @property
    def tools(self) -> list[Data]:
        """Those of the episode, as MCP describes them."""
        if self._first is None:
            raise Refused("EXECUTION_ERROR", "reset first: the tools are those of an episode")
        functions = [schema["function"] for schema in self._first.tools]
        return [
            {"name": f["name"], "description": f.get("description", ""), "input_schema": f.get("parameters", {})}
            for f in functions
        ]

    async def answer(self, kind: str, data: Data) -> tuple[str, Data]:
        """The type and the data of the reply to a message. Refused: there is none."""
        async with self._turn:
            if kind == "reset":
                return "observation", _observation(await self._reset(data))
            if kind == "step" and data.get("type") == "list_tools":
                return "observation", {"observation": {"tools": self.tools}, "reward": None, "done": False}
            if kind == "step":
                return "observation", await self._step(data)
            if kind == "mcp":
                return "mcp", await self._mcp(data)
            if kind == "state":
                return "state", {"episode_id": self._episode or None, "step_count": self._steps}
        raise Refused("UNKNOWN_TYPE", f"Unknown message type: {kind}")

    async def _reset(self, data: Data) -> Step:
        given = dict(data)
        seed, episode = given.pop("seed", None), given.pop("episode_id", None)
        seed = secrets.randbits(31) if seed is None else seed
        if not isinstance(seed, int):
            raise Refused("VALIDATION_ERROR", f"seed must be a whole number, got {seed!r}")
        task = given.get("task", given) if given else self._task(seed)
        self._running = False
        step = await self._within(self.environment.reset(task, seed=seed), "reset")
        self._first, self._running, self._steps = step, not step.done, 0
        self._episode = str(episode or secrets.token_hex(16))
        return step

    async def _step(self, data: Data) -> Data:
        try:
            action = action_from_json(data)
        except ValueError as error:
            raise Refused("VALIDATION_ERROR", str(error)) from None
        if not self._running:
            raise Refused("EXECUTION_ERROR", "no episode is under way: reset first")
        step = await self._within(self.environment.step(action), "step")
        self._running, self._steps = not step.done, self._steps + 1
        reply = _observation(step)
        if data.get("type") == "call_tool":
            said = "\n".join(str(message.get("content", "")) for message in step.messages)
            metadata = reply["observation"]["metadata"]
            reply["observation"] = {"tool_name": data["tool_name"], "result": said, "error": None, "metadata": metadata}
        return reply

    async def _mcp(self, data: Data) -> Data:
        method, params = data.get("method"), data.get("params") or {}
        answer = {"jsonrpc": "2.0", "id": data.get("id")}
        try:
            if method == "tools/list":
                tools = [{**tool, "inputSchema": tool.pop("input_schema")} for tool in self.tools]
                return {**answer, "result": {"tools": tools}}
            if method == "tools/call":
                wanted = {"tool_name": params.get("name"), "arguments": params.get("arguments", {})}
                reply = await self._step({"type": "call_tool", **wanted})
                text = reply["observation"]["result"]
                content = [{"type": "text", "text": text}]
                return {**answer, "result": {"content": content, "data": text, "is_error": False}}
        except Refused as error:
            if error.last:
                raise
            return {**answer, "error": {"code": -32603, "message": str(error)}}
        return {**answer, "error": {"code": -32601, "message": f"Method not found: {method}"}}

    async def _within(self, call: Awaitable[Step], what: str) -> Step:
        try:
            async with asyncio.timeout(self._timeout) as limit:
                return await call
        except InfrastructureError as error:
            raise Refused("INFRASTRUCTURE_ERROR", str(error), last=True) from error
        except TimeoutError as error:
            if limit.expired():
                late = f"{what} gave no answer within {self._timeout:g} s"
                raise Refused("INFRASTRUCTURE_ERROR", late, last=True) from None
            raise Refused("EXECUTION_ERROR", repr(error)) from error
        except Exception as error:
            log.exception("%s of %s failed", what, type(self.environment).__name__)
            raise Refused("EXECUTION_ERROR", f"{type(error).__name__}: {error}") from error


@contextmanager
def _as_json() -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Refused("EXECUTION_ERROR", f"the environment's step has no JSON form: {error}") from error


def _observation(step: Step) -> Data:
    with _as_json():
        return reply_to_json(step)


def write_message(answer: Data) -> str:
    """Refused: it has no JSON form."""
    with _as_json():
        return json.dumps(answer)


def read_message(text: str) -> tuple[str, Data]:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused("INVALID_JSON", f"Invalid JSON: {error}") from None
    data = message.get("data", {}) if isinstance(message, dict) else None
    if not isinstance(data, dict):
        raise Refused("VALIDATION_ERROR", "a message must be an object with a type, and data which is an object")
    return str(message.get("type", "")), data
