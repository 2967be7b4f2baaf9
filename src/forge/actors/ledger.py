"""What a component did and answered, kept so that a process that replaces its own can go on from there."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
from functools import cached_property
from itertools import chain, islice
from typing import Any

from ..controller import ForgeActor, Unrecoverable, request_id
from ..store import Journal

# A request is repeated only if its answer was on its way when the process died. Those are few; lists are batches of
# items, of which thousands would take more memory than what the component holds.
SINGLE, LISTS = 4096, 16


class Ledger:
    """Makes operations happen once, whatever happens to the process: a journal of changes, and answers by request id.

    An endpoint first looks whether its request was done before (`repeated`, `answer`). If not it makes its change and
    writes it down without an `await` between: a process that is killed before the entry is whole has done nothing, one
    that is killed after it has done all.

    Args:
        owner: the component; where it has several processes, each has a journal of its own.
        path: of the journal. None writes nothing: the component then cannot be replaced.
        lost: for the error in that case, what is lost and what to set.
        state: gives a picklable state that stands for all changes so far. Where it is given, the journal is rewritten
            with it whenever it has grown to `GROWTH` times of that.
        shared: all ranks of the owner read one journal, which rank 0 writes; they must share the file system.
    """

    GROWTH = 4
    FLOOR = 1 << 20  # bytes below which a journal is not worth rewriting

    def __init__(
        self,
        owner: ForgeActor,
        path: str | None,
        *,
        lost: str,
        state: Callable[[], Any] | None = None,
        shared: bool = False,
    ) -> None:
        self._owner, self._path, self._lost, self._state, self._shared = owner, path, lost, state, shared
        self._live = 0
        self._records = 0  # in the journal
        self._kept: tuple[dict[str, Any], dict[str, Any]] = ({}, {})  # single answers, lists

    def begin(self) -> None:
        """In a first process: start an empty journal in the place of what an earlier run left."""
        if self._owner.context.incarnation == 0 and self._writes:
            self._journal.rewrite([])
            self._records = 0

    @property
    def repeated(self) -> bool:
        """Whether the request that is being served was done before."""
        return request_id() in ChainMap(*self._kept)

    @property
    def answer(self) -> Any:
        """What was answered to it."""
        return ChainMap(*self._kept)[request_id()]  # type: ignore[index]

    def enter(self, change: Any) -> None:
        """Write down a change that is not all of a request."""
        if self._writes:
            self._append(None, change)

    def complete(self, change: Any, answer: Any) -> Any:
        """Write down a change that completes the request. Redoing it (see `replay`) must give the same answer."""
        if self._writes:
            self._append(request_id(), change)
        self._remember(request_id(), answer)
        if self._writes and self._state and self._journal.size > max(self.FLOOR, self.GROWTH * self._live):
            self._rewrite(self._state())
        return answer

    def restart(self, state: Any, answer: Any) -> Any:
        """Complete the request with a new journal that begins at `state`."""
        self._remember(request_id(), answer)
        if self._writes:
            self._rewrite(state)
        return answer

    @property
    def now(self) -> int:
        """This point in the journal, for `rebase`."""
        return self._records

    def rebase(self, state: Any, since: int) -> None:
        """Begin the journal at `state`, which stands for all changes before the point `since` (see `now`); those after
        it stay."""
        if self._writes:
            self._rewrite(state, since)

    def replay(self, restore: Callable[[Any], Any], redo: Callable[[Any], Any]) -> None:
        """Give the recorded state, if any, to `restore`, and each change since to `redo`, which returns its answer.

        Raises:
            Unrecoverable: there is no journal, it is damaged, or what it stands on is gone.
        """
        if self._path is None:
            raise Unrecoverable(f"{self._owner.context} was replaced and {self._lost}")
        try:
            for kind, head, body in self._journal.replay():
                self._records += 1
                if kind == "state":
                    self._kept = head
                    restore(body)
                else:
                    self._remember(head, redo(body))
        # Whatever else goes wrong, such as a peer that is killed meanwhile, may go better in the next process.
        except (FileNotFoundError, ValueError) as error:
            raise Unrecoverable(
                f"{self._owner.context} was replaced and cannot go on from {self._journal.path}: {error}"
            ) from error

    @cached_property
    def _journal(self) -> Journal:
        assert self._path is not None
        replica, rank = self._owner.context.replica, 0 if self._shared else self._owner.context.rank
        return Journal(f"{self._path}.{replica}.{rank}" if replica or rank else self._path)

    @property
    def _writes(self) -> bool:
        return self._path is not None and not (self._shared and self._owner.context.rank)

    def _append(self, request: str | None, change: Any) -> None:
        self._journal.append(("change", request, change))
        self._records += 1

    def _rewrite(self, state: Any, since: int | None = None) -> None:
        later = [] if since is None else islice(self._journal.replay(), since, None)
        self._journal.rewrite(chain([("state", self._kept, state)], later))
        self._records = 1 if since is None else 1 + self._records - since
        self._live = self._journal.size

    def _remember(self, request: str | None, answer: Any) -> None:
        if request is None or self._path is None:
            return
        kept, most = (self._kept[1], LISTS) if isinstance(answer, list) else (self._kept[0], SINGLE)
        kept[request] = answer
        if len(kept) > most:
            del kept[next(iter(kept))]
