"""What can go wrong between processes. Every message names the component, the replica and the call."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass


class ForgeError(RuntimeError):
    """Base of the errors that the controller itself raises."""


class ReplicaDied(ForgeError):
    """A replica's process ended, stopped answering, or could not be reached."""


class CallTimeout(ForgeError):
    """A call did not come back within its time limit; the replica may still be working on it."""


class ServiceStopped(ForgeError):
    """A call on a service that was shut down."""


class PoisonRequest(ForgeError):
    """A request that was being served when two replicas died, one after the other: it is not tried a third time."""


class Unrecoverable(ForgeError):
    """A replaced process cannot take up the state of the lost one: there is no point in trying again."""


class RemoteTraceback(Exception):
    """Carries the traceback text of another process; shown as the cause of the exception raised there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


class RemoteError(ForgeError):
    """Stands for a remote exception that could not be sent as itself; names its type and message."""


@dataclass(frozen=True, slots=True)
class RemoteFailure:
    """An exception on its way to the caller: the exception itself where it survives pickling, and its traceback."""

    where: str
    summary: str
    traceback: str
    payload: bytes | None

    @classmethod
    def capture(cls, where: str, error: BaseException) -> RemoteFailure:
        """From an exception, with its traceback as text, and pickled if that is possible."""
        payload: bytes | None
        try:
            # What ends a process or a task there (SystemExit, CancelledError) must not end one here.
            payload = pickle.dumps(error) if isinstance(error, Exception) else b""
            # Some exceptions pickle and then fail to rebuild, because their __init__ takes other arguments.
            pickle.loads(payload)
        except Exception:
            payload = None
        try:
            summary, text = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
        except Exception as unprintable:
            summary = f"{type(error).__name__} (which cannot be printed: {unprintable!r})"
            text = "".join(traceback.format_tb(error.__traceback__)) + summary
        return cls(where, summary, text, payload)

    def to_exception(self) -> BaseException:
        """The exception to raise at the caller, with the remote traceback as its cause."""
        error: BaseException = RemoteError(f"{self.where} raised {self.summary}")
        if self.payload is not None:
            try:
                error = pickle.loads(self.payload)
            except Exception as unreadable:
                error.add_note(f"(the exception itself could not be read here: {unreadable})")
        error.add_note(f"raised in {self.where}")
        error.__cause__ = RemoteTraceback(self.traceback)
        return error
