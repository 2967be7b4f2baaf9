"""Errors of processes and of messages between them. Every message names the component, the replica and the call."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass


class ForgeError(RuntimeError):
    """Base of the errors that the controller itself raises."""


class ReplicaDied(ForgeError):
    """A replica's process ended, stopped answering, or could not be reached."""


class CallTimeout(ForgeError):
    """A call gave no answer within its time limit; the replica may still be working on it."""


class ServiceStopped(ForgeError):
    """A call on a service that was shut down."""


class PoisonRequest(ForgeError):
    """A request that was being served when two replicas died, one after the other: it is not sent a third time."""


class Unrecoverable(ForgeError):
    """The state of a lost process cannot be restored: the component is not restarted."""


class RemoteTraceback(Exception):
    """Carries the traceback text of another process; shown as the cause of the exception that was raised in it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


class RemoteError(ForgeError):
    """Replaces a remote exception that cannot be pickled; names its type and message."""


@dataclass(frozen=True, slots=True)
class RemoteFailure:
    """An exception on its way to the caller: the exception itself where it survives pickling, and its traceback."""

    origin: str
    summary: str
    traceback: str
    payload: bytes | None

    @classmethod
    def capture(cls, origin: str, error: BaseException) -> RemoteFailure:
        """Capture an exception with its traceback as text, and pickled if possible."""
        payload: bytes | None
        try:
            # An exception that ends a process or a task (SystemExit, CancelledError) must not end one of the caller's.
            payload = pickle.dumps(error) if isinstance(error, Exception) else b""
            # Some exceptions pickle and then fail to rebuild, because their __init__ takes other arguments.
            pickle.loads(payload)
        except Exception:
            payload = None

        try:
            summary = f"{type(error).__name__}: {error}"
            text = "".join(traceback.format_exception(error))
        except Exception as unprintable:
            summary = f"{type(error).__name__} (which cannot be printed: {unprintable!r})"
            text = "".join(traceback.format_tb(error.__traceback__)) + summary

        return cls(origin, summary, text, payload)

    def to_exception(self) -> BaseException:
        """Return the exception to raise at the caller, with the remote traceback as its cause."""
        error: BaseException = RemoteError(f"{self.origin} raised {self.summary}")
        if self.payload is not None:
            try:
                error = pickle.loads(self.payload)
            except Exception as unreadable:
                error.add_note(f"(the exception itself could not be unpickled in this process: {unreadable})")
        error.add_note(f"raised in {self.origin}")
        error.__cause__ = RemoteTraceback(self.traceback)
        return error
