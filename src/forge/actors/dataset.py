"""The prompt stream as a service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..controller import ForgeActor, endpoint
from ..data.prompts import supervised
from ..observability import Reduce, record_metric
from ..types import Episode, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DatasetActor(ForgeActor):
    """Hands out samples in a fixed, resumable order.

    Args:
        tokenizer: Hugging Face folder or hub id whose tokenizer makes the prompts.
        **dataset: settings of `forge.data.dataset.PromptDataset`.
    """

    def __init__(self, tokenizer: str, **dataset: Any) -> None:
        self.tokenizer_path, self.settings = tokenizer, dataset

    def setup(self) -> None:
        from transformers import AutoTokenizer

        from ..data.dataset import PromptDataset

        self.tokenizer = AutoTokenizer.from_pretrained(self.tokenizer_path)
        self.dataset = PromptDataset(tokenizer=self.tokenizer, **self.settings)

    @endpoint
    def sample(self) -> Sample:
        """The next `(prompt, target)`. Rows left out on the way are counted in `data/skipped`."""
        skipped = self.dataset.skipped
        sample = next(self.dataset)
        record_metric("data/skipped", self.dataset.skipped - skipped, Reduce.SUM)
        return sample

    @endpoint
    def supervised(self, n: int) -> list[Episode]:
        """The next n samples with their targets as responses, to be imitated."""
        return [imitate(next(self.dataset), self.tokenizer) for _ in range(n)]

    @endpoint
    def state_dict(self) -> dict[str, Any]:
        """The position in the stream."""
        return self.dataset.state_dict()

    @endpoint
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position."""
        self.dataset.load_state_dict(state)


def imitate(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Episode:
    """An episode whose response is the target and the end-of-sequence token."""
    tokens, mask = supervised(sample, tokenizer)
    context = mask.index(True)
    return Episode(prompt_ids=tokens[:context], response_ids=tokens[context:], advantage=1.0)
