"""A journal of a trainer's changes and answers, from which a process that replaces the trainer continues."""

from collections.abc import Callable
from functools import cached_property
from itertools import chain, islice
from typing import Any

from ..runtime.controller import ForgeActor, Unrecoverable, request_id
from ..runtime.store import Journal

# Answers that are kept, the latest ones. Only a request whose answer was on its way when the process died is repeated.
ANSWERS = 4096


class Ledger:
    """Journal of a component's state changes and answers, by which each request changes the state once even if the
    process dies.

    An endpoint first asks whether its request was done before, and if so returns the recorded answer (`repeated`,
    `answer`). If not, it makes its change and records it (`complete`, `restart`), without an `await` in between: a
    process that is killed before the record is whole has done nothing, and one that is killed later has done all. All
    ranks of the owner read one journal, which rank 0 writes: they must share the file system.

    Args:
        owner: the component that the changes are made to.
        path: of the journal; None records nothing, and the component cannot be replaced.
        lost: for the error in that case: which state is lost, and which setting would keep it.
    """

    def __init__(self, owner: ForgeActor, path: str | None, *, lost: str) -> None:
        self._owner, self._path, self._lost = owner, path, lost
        self.records = 0  # number of records in the journal, which marks its present end for `rebase`
        self._answers: dict[str, Any] = {}  # by request id

    def begin(self) -> None:
        """Empty the journal of an earlier run; has no effect in a replacement process."""
        if self._owner.context.incarnation == 0 and self._is_writer:
            self._open_journal.rewrite([])

    @property
    def repeated(self) -> bool:
        """Return whether the current request was completed before."""
        return request_id() in self._answers

    @property
    def answer(self) -> Any:
        """Return the recorded answer to the current request."""
        return self._answers[request_id()]  # type: ignore[index]

    def complete(self, change: Any, answer: Any) -> Any:
        """Record the change that completes the current request, and return the request's answer.

        Args:
            change: what `replay` passes to `redo`, which must give the same answer.
        """
        if self._is_writer:
            self._open_journal.append(("change", request_id(), change))
            self.records += 1
        self._remember_answer(request_id(), answer)
        return answer

    def restart(self, state: Any, answer: Any) -> Any:
        """Complete the current request and start a new journal from `state`; return the request's answer.

        Args:
            state: what `replay` passes to `restore`, such as the path of a checkpoint.
        """
        self._remember_answer(request_id(), answer)
        if self._is_writer:
            self._rewrite_journal(state)
        return answer

    def rebase(self, state: Any, since: int) -> None:
        """Replace all journal records up to position `since` by `state`, which includes their changes.

        Args:
            since: `records` at the moment when the state was copied.
        """
        if self._is_writer:
            self._rewrite_journal(state, since)

    def replay(self, restore: Callable[[Any], Any], redo: Callable[[Any], Any]) -> None:
        """Repeat the recorded changes of the journal in a replacement process.

        Args:
            restore: restores the recorded state, if there is one.
            redo: makes one of the changes after it, and returns the answer to its request.

        Raises:
            Unrecoverable: there is no journal, it is damaged, or the state that it starts from is gone.
        """
        if self._path is None:
            raise Unrecoverable(f"{self._owner.context} was replaced and {self._lost}")

        try:
            for kind, head, body in self._open_journal.replay():
                self.records += 1
                if kind == "state":
                    self._answers = head
                    restore(body)
                else:
                    self._remember_answer(head, redo(body))
        # Other errors pass: what they report, such as a peer that was killed, may not happen to the next process.
        except (FileNotFoundError, ValueError) as error:
            raise Unrecoverable(
                f"{self._owner.context} was replaced and cannot continue from {self._open_journal.path}: {error}"
            ) from error

    @cached_property
    def _open_journal(self) -> Journal:
        replica = self._owner.context.replica
        return Journal(f"{self._path}.{replica}.0" if replica else self._path)  # type: ignore[arg-type]

    @property
    def _is_writer(self) -> bool:
        return self._path is not None and not self._owner.context.rank

    # Start the journal at `state`, followed by the records from number `since` on (None: by none).
    def _rewrite_journal(self, state: Any, since: int | None = None) -> None:
        later = [] if since is None else islice(self._open_journal.replay(), since, None)
        self._open_journal.rewrite(chain([("state", self._answers, state)], later))
        self.records = 1 if since is None else 1 + self.records - since

    def _remember_answer(self, request: str | None, answer: Any) -> None:
        if request is None or self._path is None:
            return
        self._answers[request] = answer
        if len(self._answers) > ANSWERS:
            del self._answers[next(iter(self._answers))]
