"""Errors of processes and of messages between them. Every message names the component, the replica and the call."""

import pickle
import traceback
from contextlib import suppress
from dataclasses import dataclass


class ForgeError(RuntimeError):
    """Base of the errors that the controller itself raises."""


class ReplicaDied(ForgeError):
    """Error: a replica's process exited, stopped responding, or could not be reached."""


class CallTimeout(ForgeError):
    """Error: a call did not return within its time limit; the replica may still be working on it."""


class ServiceStopped(ForgeError):
    """Error: a call was made on a service that was shut down."""


class PoisonRequest(ForgeError):
    """Error: two replicas died one after the other while they served the request, so it is not sent a third time."""


class Unrecoverable(ForgeError):
    """Error: the state of a lost process cannot be restored, so the component is not restarted."""


class RemoteTraceback(Exception):
    """Exception with the text of another process's traceback, used as the cause of the exception raised there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


class RemoteError(ForgeError):
    """Replacement for a remote exception that cannot be pickled, with the exception's type and message."""


@dataclass(frozen=True, slots=True)
class RemoteFailure:
    """Picklable form of an exception that is sent from a component's process to the caller's.

    Attributes:
        origin: what raised it, e.g. "counter[0].add (pid 1234)".
        summary: class and message of the exception.
        traceback: its traceback as text.
        payload: the pickled exception; None if it does not survive pickling, or would end the caller's process or task.
    """

    origin: str
    summary: str
    traceback: str
    payload: bytes | None

    @classmethod
    def capture(cls, origin: str, error: BaseException) -> "RemoteFailure":
        """Return the picklable form of `error`, which was raised in `origin`."""
        payload = None

        # An exception that ends a process or a task (SystemExit, CancelledError) must not end one of the caller's.
        if isinstance(error, Exception):
            with suppress(Exception):  # it cannot be pickled
                pickled = pickle.dumps(error)
                pickle.loads(pickled)  # some pickle, and fail to rebuild: their __init__ takes other arguments
                payload = pickled

        try:
            summary = f"{type(error).__name__}: {error}"
            text = "".join(traceback.format_exception(error))
        except Exception as unprintable:  # its own __str__ raised
            summary = f"{type(error).__name__} (which cannot be printed: {unprintable!r})"
            text = "".join(traceback.format_tb(error.__traceback__)) + summary

        return cls(origin, summary, text, payload)

    def to_exception(self) -> BaseException:
        """Return the exception to raise in the caller's process, with the remote traceback as its cause.

        It is the captured exception, or a RemoteError with its class and message if there is no pickled one.
        """
        error: BaseException = RemoteError(f"{self.origin} raised {self.summary}")
        if self.payload is not None:
            try:
                error = pickle.loads(self.payload)
            except Exception as unreadable:
                error.add_note(f"(the exception itself could not be unpickled in this process: {unreadable})")

        error.add_note(f"raised in {self.origin}")
        error.__cause__ = RemoteTraceback(self.traceback)
        return error
