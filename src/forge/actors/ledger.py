"""A journal of what a trainer did and answered, from which the process that replaces it continues."""

from collections.abc import Callable
from functools import cached_property
from itertools import chain, islice
from typing import Any

from ..runtime.controller import ForgeActor, Unrecoverable, request_id
from ..runtime.store import Journal

# A request is repeated only if its answer was on its way when the process died; those are few.
ANSWERS = 4096


class Ledger:
    """Makes operations happen once, whatever happens to the process: a journal of changes, and answers by request id.

    An endpoint first looks whether its request was done before (`repeated`, `answer`). If not it makes its change and
    writes it down without an `await` between: a process that is killed before the entry is whole has done nothing, one
    that is killed after it has done all. All ranks of the owner read one journal, which rank 0 writes: they must share
    the file system.

    Args:
        owner: the component.
        path: of the journal. None writes nothing: the component then cannot be replaced.
        lost: for the error in that case: the state that is lost and the setting that keeps it.
    """

    def __init__(self, owner: ForgeActor, path: str | None, *, lost: str) -> None:
        self._owner = owner
        self._path = path
        self._lost = lost
        self._records = 0  # in the journal
        self._answers: dict[str, Any] = {}

    def begin(self) -> None:
        """Start an empty journal, if this is the first process: an earlier run may have left one."""
        if self._owner.context.incarnation == 0 and self._list_writes:
            self._open_journal.rewrite([])
            self._records = 0

    @property
    def repeated(self) -> bool:
        """Return whether the request that is being served was done before."""
        return request_id() in self._answers

    @property
    def answer(self) -> Any:
        """Return the recorded answer to the request that is being served."""
        return self._answers[request_id()]  # type: ignore[index]

    def complete(self, change: Any, answer: Any) -> Any:
        """Record a change that completes the request. Redoing it (see `replay`) must give the same answer."""
        if self._list_writes:
            self._open_journal.append(("change", request_id(), change))
            self._records += 1
        self._remember_answer(request_id(), answer)
        return answer

    def restart(self, state: Any, answer: Any) -> Any:
        """Complete the request with a new journal that starts at `state`."""
        self._remember_answer(request_id(), answer)
        if self._list_writes:
            self._rewrite_journal(state)
        return answer

    @property
    def now(self) -> int:
        """This point in the journal, for `rebase`."""
        return self._records

    def rebase(self, state: Any, since: int) -> None:
        """Start the journal at `state`, which replaces all changes before the point `since` (see `now`); those after it
        stay."""
        if self._list_writes:
            self._rewrite_journal(state, since)

    def replay(self, restore: Callable[[Any], Any], redo: Callable[[Any], Any]) -> None:
        """Pass the recorded state, if any, to `restore`, and each change after it to `redo`, which returns its answer.

        Raises:
            Unrecoverable: there is no journal, it is damaged, or what it stands on is gone.
        """
        if self._path is None:
            raise Unrecoverable(f"{self._owner.context} was replaced and {self._lost}")

        try:
            for kind, head, body in self._open_journal.replay():
                self._records += 1
                if kind == "state":
                    self._answers = head
                    restore(body)
                else:
                    self._remember_answer(head, redo(body))
        # Whatever else goes wrong, such as a peer that is killed meanwhile, may go better in the next process.
        except (FileNotFoundError, ValueError) as error:
            raise Unrecoverable(
                f"{self._owner.context} was replaced and cannot continue from {self._open_journal.path}: {error}"
            ) from error

    @cached_property
    def _open_journal(self) -> Journal:
        assert self._path is not None
        replica = self._owner.context.replica
        return Journal(f"{self._path}.{replica}.0" if replica else self._path)

    @property
    def _list_writes(self) -> bool:
        return self._path is not None and not self._owner.context.rank

    def _rewrite_journal(self, state: Any, since: int | None = None) -> None:
        later = [] if since is None else islice(self._open_journal.replay(), since, None)
        self._open_journal.rewrite(chain([("state", self._answers, state)], later))
        self._records = 1 if since is None else 1 + self._records - since

    def _remember_answer(self, request: str | None, answer: Any) -> None:
        if request is None or self._path is None:
            return
        self._answers[request] = answer
        if len(self._answers) > ANSWERS:
            del self._answers[next(iter(self._answers))]
