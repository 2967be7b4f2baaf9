"""Texts that the ranks of a put exchange, by the key-value store of their process group."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from .errors import CorruptWeights, IncompleteVersion, MissingVersion, VersionConflict
from .transfer import Ranks

ERRORS = {error.__name__: error for error in (OSError, VersionConflict, MissingVersion, CorruptWeights)}
# Puts of a name so far in this process, as all ranks count them.
_attempts: Counter[str] = Counter()
# Names of the texts of this rank; those of an earlier put are removed once all ranks are in the next one.
_message_names: list[str] = []


class Rendezvous:
    """The ranks of one put. An error of one is raised in all.

    Args:
        name: of what is put.
        timeout: seconds to wait for a rank.
    """

    def __init__(self, ranks: Ranks, name: str, timeout: float) -> None:
        self._ranks = ranks
        self._timeout = timeout
        self._texts: dict[str, str] = {}
        _attempts[name] += 1
        self._name = f"{ranks.group}/{name}/{_attempts[name]}"
        self._earlier = len(_message_names)
        self._error: Exception | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that decides for all."""
        return self._ranks.rank == 0

    def failed(self, work: Callable[[], object]) -> bool:
        """Do this rank's work; return whether it failed, which the next exchange raises in every rank."""
        try:
            work()
        except Exception as error:
            self._error = error
        return self._error is not None

    def broadcast(self, label: str, text: str) -> None:
        """Send a text to the other ranks, as the first."""
        self._set(f"{label}/0", text)

    def receive(self, label: str) -> str:
        """The text of the first rank. IncompleteVersion: it sends none in time; or its error."""
        # A failed first rank has sent nothing, and the others must not wait for it.
        if self.is_first and self._error is not None:
            self._set(f"{label}/0", "")
        (text,) = self._wait(label, [0])
        return text

    def gather(self, label: str, text: str) -> list[str]:
        """The texts of all ranks. IncompleteVersion: names the ranks that send none in time; or the error of one."""
        self._set(f"{label}/{self._ranks.rank}", text)
        texts = self._wait(label, list(range(self._ranks.world)))
        # All ranks are here, so none still reads the texts of an earlier put.
        for name in _message_names[: self._earlier]:
            dist.distributed_c10d._get_default_store().delete_key(name)
        del _message_names[: self._earlier]
        self._earlier = 0
        return texts

    def _set(self, label: str, text: str) -> None:
        kind = None if self._error is None else type(self._error).__name__
        message = json.dumps([kind, text if self._error is None else str(self._error)])
        if self._ranks.world > 1:
            dist.distributed_c10d._get_default_store().set(f"{self._name}/{label}", message)
            _message_names.append(f"{self._name}/{label}")
        else:
            self._texts[label] = message

    def _wait(self, label: str, ranks: list[int]) -> list[str]:
        if self._ranks.world == 1:
            messages = [self._texts[f"{label}/0"]]
        else:
            store = dist.distributed_c10d._get_default_store()
            names = [f"{self._name}/{label}/{rank}" for rank in ranks]
            try:
                store.wait(names, timedelta(seconds=self._timeout))
            except RuntimeError:  # each kind of key-value store has its own, for a rank that is late
                absent = [rank for rank, name in zip(ranks, names, strict=True) if not store.check([name])]
                text = f"rank {self._ranks.rank} waited {self._timeout:g} s for what ranks {absent} should put"
                raise IncompleteVersion(text) from None
            messages = [store.get(name).decode() for name in names]
        # This rank's own error has its traceback.
        if self._error is not None:
            raise self._error
        texts = []
        for rank, message in zip(ranks, messages, strict=True):
            kind, text = json.loads(message)
            if kind is not None:
                raise ERRORS.get(kind, IncompleteVersion)(f"rank {rank}: {text}")
            texts.append(text)
        return texts
