"""Calls of a reward in a separate process, with a limit of time: it may hang or crash, and its caller stays."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from forge.rewards.reward import Reward
from forge.rewards.rules import load_reward
from forge.types import Prompt

START = 60.0  # seconds for the imports of the reward's module


@dataclass(frozen=True)
class Case:
    """A prompt of the data with its target and row."""

    prompt: str
    target: str | None
    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of a call: rewards, one of each response, or an error in one line."""

    rewards: tuple[float | None, ...] = ()
    error: str = ""
    seconds: float = 0.0

    @property
    def reward(self) -> float | None:
        """Return that of the only response; None if it was not scored, or the call failed."""
        return self.rewards[0] if self.rewards else None


class RewardProcess:
    """Calls a reward, `package.module:name`, and ends its process where it takes too long.

    Args:
        limit: seconds of a call.
    """

    def __init__(self, name: str, limit: float) -> None:
        self.name, self.limit = name, limit
        self._process: Any = None

    def __enter__(self) -> RewardProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def call(self, case: Case, responses: Sequence[str], target: str | None = None) -> Outcome:
        """Score a group of responses.

        Args:
            target: instead of the case's.
        """
        if self._process is None:
            self._start_process()
        began = time.monotonic()
        rewards, error = (), f"no answer within {self.limit:g} s"

        try:
            target = case.target if target is None else target
            self._pipe.send((Prompt(case.prompt, (), 0, dict(case.row)), list(responses), target))
            if self._pipe.poll(self.limit):
                rewards, error = self._pipe.recv()
            else:
                self.end()
        except (BrokenPipeError, EOFError):
            self._process.join()
            error = f"its process ended with {self._process.exitcode}"
            self.end()

        return Outcome(rewards, error, time.monotonic() - began)

    def end(self) -> None:
        """End the process with all that it has started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.join()
            self._pipe.close()
        self._process = None

    def _start_process(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other_end = context.Pipe()
        self._process = context.Process(target=_serve_requests, args=(self.name, other_end))
        self._process.start()
        other_end.close()
        # Its start is not a part of the first call.
        if self._pipe.poll(START):
            with suppress(EOFError):  # it has ended by itself: the call says so
                self._pipe.recv()


def _serve_requests(name: str, pipe: Connection) -> None:
    """Answer requests until there are no more."""
    os.setsid()  # a group, so that what the reward starts ends with it
    reward = Reward([load_reward(name)], None)
    reward.setup()
    pipe.send(None)

    async def answer_request() -> None:
        while True:
            request = pipe.recv()
            try:
                scores = await reward.score(*request)
            except Exception as error:  # whatever user code raises is what is looked for
                pipe.send(((), f"{type(error).__name__}: {error}"[:300]))
            else:
                pipe.send((tuple(score.reward for score in scores), ""))

    with suppress(EOFError):
        asyncio.run(answer_request())
