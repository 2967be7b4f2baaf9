"""The data of a run as a service."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ..controller import ForgeActor, endpoint
from ..data.load import Data, Kind, load_data
from ..data.preferences import Pair
from ..observability import Reduce, record_metric
from ..types import Episode, Sample
from .contents import Seen
from .ledger import Ledger


class DatasetActor(ForgeActor):
    """Hands out samples, episodes or pairs in a fixed, resumable order.

    Args:
        tokenizer: Hugging Face folder or hub id whose tokenizer makes the tokens.
        kind: "prompts" (`sample`), "supervised" (`supervised`) or "preferences" (`pairs`).
        sources: several datasets in shares, see `forge.data.load.load_data`.
        journal: file from which a replaced dataset takes up its position; None makes the loss of its process the end
            of the run.
        remember: how many of the last samples are kept, so that those whose rollouts were under way when the state was
            saved can be handed out again.
        **dataset: settings of the dataset: of `PromptDataset`, `SupervisedDataset` or `PreferenceDataset`.
    """

    def __init__(
        self,
        tokenizer: str,
        *,
        kind: Kind = "prompts",
        sources: Sequence[Mapping[str, Any]] | None = None,
        journal: str | None = None,
        remember: int = 1 << 16,
        **dataset: Any,
    ) -> None:
        self.tokenizer_path, self.kind = tokenizer, kind
        self.settings = {"sources": sources, **dataset}
        self.issued: deque[Sample] = deque(maxlen=remember)
        self.again: deque[Sample] = deque()  # to be handed out before the stream goes on
        lost = "the position in the data is lost: give DatasetActor a journal= to keep it"
        self.ledger = Ledger(self, journal, lost=lost, state=self.state_dict)

    def setup(self) -> None:
        from transformers import AutoTokenizer

        self.ledger.begin()
        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer_path)
        self.dataset: Data = load_data(tokenizer, kind=self.kind, **self.settings)

    def on_respawn(self) -> None:
        position = self.dataset.state_dict()

        def restore(state: dict[str, Any]) -> None:
            nonlocal position
            position = state["position"]
            self._recall(state["issued"], state["again"])

        def redo(change: tuple[Any, dict[str, Any]]) -> Any:
            nonlocal position
            answer, position = change
            if isinstance(answer, Sample):
                self._issue(answer)
            return answer

        self.ledger.replay(restore, redo)
        # Only to the last one: going to a position in a stream means reading up to it.
        self.dataset.load_state_dict(position)

    @endpoint
    def sample(self) -> Sample:
        """The next `(prompt, target)`. Rows left out on the way are counted in `data/skipped`."""
        self._only("sample", "prompts")
        if self.ledger.repeated:
            return self.ledger.answer
        sample = self.again[0] if self.again else self._next()
        self._issue(sample)
        return self._complete(sample)

    @endpoint
    def supervised(self, n: int) -> list[Episode]:
        """The next n episodes to be imitated."""
        self._only("supervised", "supervised")
        if self.ledger.repeated:
            return self.ledger.answer
        return self._complete([self._next() for _ in range(n)])

    @endpoint
    def pairs(self, n: int) -> list[Episode]:
        """The next n pairs as 2n episodes: chosen, rejected, chosen, rejected."""
        self._only("pairs", "preferences")
        if self.ledger.repeated:
            return self.ledger.answer
        drawn: list[Pair] = [self._next() for _ in range(n)]
        return self._complete([episode for pair in drawn for episode in pair])

    @endpoint
    def state_dict(self, seen: Seen | None = None) -> dict[str, Any]:
        """The position in the stream, and the samples before it that may have to be handed out again.

        Args:
            seen: the indices that are done with; their samples are forgotten.
        """
        if seen is not None:
            self.issued = deque((s for s in self.issued if s.prompt.index not in seen), self.issued.maxlen)
        return {"position": self.dataset.state_dict(), "issued": list(self.issued), "again": list(self.again)}

    @endpoint
    def load_state_dict(self, state: dict[str, Any], seen: Seen | None = None) -> list[int]:
        """Go on from a saved position.

        Args:
            seen: the indices that are done with: all others before the position are handed out again first. None says
                that all are.

        Returns:
            indices that would have to be, and that the state does not remember.
        """
        if self.ledger.repeated:
            return self.ledger.answer
        self.dataset.load_state_dict(state["position"])
        forgotten: list[int] = []
        if seen is None:
            self._recall(state["issued"], state["again"])
        else:
            known = {sample.prompt.index: sample for sample in [*state["issued"], *state["again"]]}
            open_ = [index for index in range(seen.low, self.dataset.served) if index not in seen]
            forgotten = [index for index in open_ if index not in known]
            self._recall([], [known[index] for index in open_ if index in known])
        return self.ledger.restart(self.state_dict(), forgotten)

    def _only(self, endpoint: str, *kinds: str) -> None:
        if self.kind not in kinds:
            raise ValueError(f"{endpoint} needs a dataset of kind {' or '.join(kinds)}; this one is of {self.kind}")

    def _next(self) -> Any:
        skipped = self.dataset.skipped
        try:
            item = next(self.dataset)
        except StopIteration:
            raise ValueError("the data has ended: raise or unset epochs, or take fewer steps") from None
        record_metric("data/skipped", self.dataset.skipped - skipped, Reduce.SUM)
        return item

    def _recall(self, issued: list[Sample], again: list[Sample]) -> None:
        self.issued.clear()
        self.issued.extend(issued)
        self.again = deque(again)

    def _issue(self, sample: Sample) -> None:
        if self.again and self.again[0].prompt.index == sample.prompt.index:
            self.again.popleft()
        self.issued.append(sample)

    def _complete(self, answer: Any) -> Any:
        return self.ledger.complete((answer, self.dataset.state_dict()), answer)
