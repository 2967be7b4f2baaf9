"""A component in the process of its caller, behind the verbs of a service: no copy and no message per call."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .errors import CallTimeout
from .handle import Call, Handle

CALL_TIMEOUT = 1800.0


class Local(Handle):
    """What `ForgeActor.as_local` returns. Arguments and answers are shared with the caller, not copied.

    `async def` endpoints run in the caller's event loop. Plain `def` endpoints run in a thread of the component's own,
    one at a time, so that slow ones (tokenising, reading files) do not block the loop.
    """

    def __init__(self, name: str, component: Any, endpoints: Mapping[str, bool]) -> None:
        super().__init__(name, frozenset(endpoints))
        self._component = component
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def _dispatch(self, call: Call) -> Any:
        method, limit = getattr(self._component, call.endpoint), call.timeout or CALL_TIMEOUT
        try:
            async with asyncio.timeout(limit) as expiry:
                if inspect.iscoroutinefunction(method):
                    answer = await method(*call.args, **call.kwargs)
                else:
                    context = contextvars.copy_context()
                    loop = asyncio.get_running_loop()
                    answer = await loop.run_in_executor(
                        self._thread, lambda: context.run(method, *call.args, **call.kwargs)
                    )
        except TimeoutError:
            if not expiry.expired():
                raise
            raise CallTimeout(
                f"{call.caller} waited {limit:g} s for {self._name}.{call.endpoint}, in this process"
            ) from None
        return answer if call.verb in ("route", "call_one") else [answer]

    def _end_session(self, session: str) -> None:
        """There is one instance: a session needs no place of its own."""
