"""The prompt stream as a service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..controller import ForgeActor, endpoint
from ..data.prompts import supervised
from ..observability import Reduce, record_metric
from ..types import Episode, Sample
from .ledger import Ledger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DatasetActor(ForgeActor):
    """Hands out samples in a fixed, resumable order.

    Args:
        tokenizer: Hugging Face folder or hub id whose tokenizer makes the prompts.
        journal: file from which a replaced dataset takes up its position; None makes the loss of its process the end
            of the run.
        **dataset: settings of `forge.data.dataset.PromptDataset`.
    """

    def __init__(self, tokenizer: str, *, journal: str | None = None, **dataset: Any) -> None:
        self.tokenizer_path, self.settings = tokenizer, dataset
        lost = "the position in the data is lost: give DatasetActor a journal= to keep it"
        self.ledger = Ledger(self, journal, lost=lost, state=self.state_dict)

    def setup(self) -> None:
        from transformers import AutoTokenizer

        from ..data.dataset import PromptDataset

        self.ledger.begin()
        self.tokenizer = AutoTokenizer.from_pretrained(self.tokenizer_path)
        self.dataset = PromptDataset(tokenizer=self.tokenizer, **self.settings)

    def on_respawn(self) -> None:
        position = self.dataset.state_dict()

        def restore(recorded: dict[str, Any]) -> None:
            nonlocal position
            position = recorded

        def redo(change: tuple[Any, dict[str, Any]]) -> Any:
            answer, recorded = change
            restore(recorded)
            return answer

        self.ledger.replay(restore, redo)
        # Only to the last one: going to a position in a stream means reading up to it.
        self.dataset.load_state_dict(position)

    @endpoint
    def sample(self) -> Sample:
        """The next `(prompt, target)`. Rows left out on the way are counted in `data/skipped`."""
        if self.ledger.repeated:
            return self.ledger.answer
        skipped = self.dataset.skipped
        sample = next(self.dataset)
        record_metric("data/skipped", self.dataset.skipped - skipped, Reduce.SUM)
        return self._complete(sample)

    @endpoint
    def supervised(self, n: int) -> list[Episode]:
        """The next n samples with their targets as responses, to be imitated."""
        if self.ledger.repeated:
            return self.ledger.answer
        return self._complete([imitate(next(self.dataset), self.tokenizer) for _ in range(n)])

    @endpoint
    def state_dict(self) -> dict[str, Any]:
        """The position in the stream."""
        return self.dataset.state_dict()

    @endpoint
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position."""
        if self.ledger.repeated:
            return
        self.dataset.load_state_dict(state)
        self.ledger.restart(state, None)

    def _complete(self, answer: Any) -> Any:
        return self.ledger.complete((answer, self.dataset.state_dict()), answer)


def imitate(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Episode:
    """An episode whose response is the target and the end-of-sequence token."""
    tokens, mask = supervised(sample, tokenizer)
    context = mask.index(True)
    return Episode(prompt_ids=tokens[:context], response_ids=tokens[context:], advantage=1.0)
