"""Calls of a reward in a process of its kind, with a limit of time."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

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
        """That of the only response; None if it was not scored, or the call failed."""
        return self.rewards[0] if self.rewards else None


class RewardProcess:
    """Calls a reward, `package.module:name`, and ends its process where it takes too long.

    Args:
        limit: seconds of a call.
    """

    def __init__(self, name: str, limit: float) -> None:
        self.name, self.limit = name, limit
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RewardProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def call(self, case: Case, responses: Sequence[str], target: str | None = None) -> Outcome:
        """Score a group of responses.

        Args:
            target: in place of the case's.
        """
        request: dict[str, Any] = {"prompt": case.prompt, "responses": list(responses), "row": dict(case.row)}
        request["target"] = case.target if target is None else target
        began = time.monotonic()
        try:
            process = self._started()
            assert process.stdin is not None
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = self._line(process, self.limit)
        except (BrokenPipeError, EOFError):
            code = self._process.wait() if self._process is not None else 0
            self.end()
            return Outcome(error=f"its process ended with {code}", seconds=time.monotonic() - began)
        except TimeoutError:
            self.end()
            return Outcome(error=f"no answer within {self.limit:g} s", seconds=self.limit)
        answer = json.loads(line)
        if "error" in answer:
            return Outcome(error=answer["error"], seconds=answer["seconds"])
        return Outcome(tuple(answer["rewards"]), seconds=answer["seconds"])

    def end(self) -> None:
        """End the process with all that it has started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
        self._process = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            command = [sys.executable, "-m", "forge_inspect.reward_doctor.worker", self.name]
            # The reward's module may be of the working folder, as in `forge train`.
            paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # A separate group, so that what the reward has started ends with it.
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": paths},
            )
            self._line(self._process, START)
        return self._process

    def _line(self, process: subprocess.Popen[bytes], limit: float) -> bytes:
        """The next line of its answers. TimeoutError: it took too long. EOFError: the process has ended."""
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        deadline = time.monotonic() + limit
        line = b""
        while not line.endswith(b"\n"):
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([descriptor], [], [], remaining)[0]:
                raise TimeoutError
            part = os.read(descriptor, 1 << 16)
            if not part:
                raise EOFError
            line += part
        return line
