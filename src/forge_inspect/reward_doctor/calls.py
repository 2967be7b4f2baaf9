"""Calls of a reward in a separate process with a time limit: if it hangs or crashes, the caller continues."""

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
    """A prompt of the data with its target (None for no target) and the other columns of its row."""

    prompt: str
    target: str | None
    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Result of a call: a reward for each response (None if it was not scored), or an error in one line."""

    rewards: tuple[float | None, ...] = ()
    error: str = ""
    seconds: float = 0.0

    @property
    def reward(self) -> float | None:
        """Return the reward of the first response; None if it was not scored, or the call failed."""
        return self.rewards[0] if self.rewards else None


class RewardProcess:
    """Separate process that calls a reward, and is killed if a call takes too long.

    Args:
        name: of the reward, `package.module:name`.
        limit: seconds that a call may take.
    """

    def __init__(self, name: str, limit: float) -> None:
        self.name, self.limit = name, limit
        self._process: Any = None

    def call(self, case: Case, responses: Sequence[str], target: str | None = None) -> Outcome:
        """Score a group of responses to a prompt, in a new process if there is none.

        Args:
            target: replaces the target of the case, unless it is None.
        """
        if self._process is None:
            self._start_process()
        target = case.target if target is None else target
        request = Prompt(case.prompt, (), 0, dict(case.row)), list(responses), target
        start = time.monotonic()
        rewards, error = (), f"no answer within {self.limit:g} s"

        # The pipe breaks if the process ends before or while it computes.
        try:
            self._pipe.send(request)
            if self._pipe.poll(self.limit):
                rewards, error = self._pipe.recv()
            else:
                self.close()
        except (BrokenPipeError, EOFError):
            self._process.join()
            error = f"its process ended with {self._process.exitcode}"
            self.close()

        return Outcome(rewards, error, time.monotonic() - start)

    def close(self) -> None:
        """Kill the process and all processes that it has started; the next call starts a new one."""
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
        # Wait until it has started, so that the first call does not include that time.
        if self._pipe.poll(START):
            with suppress(EOFError):  # it has already ended: the call reports that
                self._pipe.recv()


def _serve_requests(name: str, pipe: Connection) -> None:
    """Answer the requests that come through a pipe until it is closed; the function of the process."""
    os.setsid()  # a new process group, so that processes which the reward starts end with it
    reward = Reward([load_reward(name)], None)
    reward.setup()
    pipe.send(None)

    async def answer_request() -> None:
        while True:
            request = pipe.recv()
            try:
                scores = await reward.score(*request)
            except Exception as error:  # whatever the reward raises is a finding
                pipe.send(((), f"{type(error).__name__}: {error}"[:300]))
            else:
                pipe.send((tuple(score.reward for score in scores), ""))

    with suppress(EOFError):
        asyncio.run(answer_request())
