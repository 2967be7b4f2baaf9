"""The data of a run, in a fixed order that can be resumed at every position."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ..data.files import PathOrRows, read_path_or_rows
from ..data.load import Data, Kind, check_settings, load_data
from ..data.stream import RowStream
from ..models.tokenizer import open_tokenizer
from ..observability import Reduce, record_metric
from ..runtime.controller import ForgeActor, Unrecoverable, endpoint
from ..types import Episode, Pair, Sample, Seen


class DataEnded(ValueError):
    """All epochs of the data are over."""


class DatasetActor(ForgeActor):
    """Hands out samples, episodes or pairs in a fixed, resumable order.

    It lives in the controller (`as_local`), where its plain endpoints run in a thread so that tokenising does not block
    the event loop, or in a separate process (`as_actor`), whose loss ends the run.

    Args:
        tokenizer: Hugging Face folder or hub id whose tokenizer makes the tokens.
        kind: "prompts" (`sample`), "supervised" (`supervised`) or "preferences" (`pairs`).
        path: of the rows: a file, a folder, a hub id, or the rows themselves.
        sources: several datasets in shares, see `forge.data.load.load_data`.
        remember: how many of the last samples are kept, so that those whose rollouts were under way when the state was
            saved can be handed out again.
        **dataset: settings of the dataset, and whether its rows are `checked`: of `PromptDataset`, `SupervisedDataset`
            or `PreferenceDataset`.
    """

    constructor_checks = True

    def __init__(
        self,
        tokenizer: str,
        path: PathOrRows = None,
        *,
        kind: Kind = "prompts",
        sources: Sequence[Mapping[str, Any]] | None = None,
        remember: int = 1 << 16,
        **dataset: Any,
    ) -> None:
        if not isinstance(tokenizer, str):
            raise ValueError(
                f"DatasetActor takes the model whose tokenizer it uses first, and then the rows, got {tokenizer!r:.80}"
            )
        self.tokenizer_path = tokenizer
        self.kind = kind
        self.settings = {"path": read_path_or_rows(path), "sources": sources, **dataset}
        check_settings(kind, self.settings)
        self.issued: deque[Sample] = deque(maxlen=remember)
        self.again: deque[Sample] = deque()  # to be handed out before the stream continues

    def setup(self) -> None:
        """Open the data. ValueError, FileNotFoundError: as `forge.data.load.load_data`."""
        tokenizer = open_tokenizer(self.tokenizer_path)
        self.dataset: Data = load_data(tokenizer, kind=self.kind, **self.settings)

    def on_respawn(self) -> None:
        """Unrecoverable: the position was lost with the process."""
        raise Unrecoverable(f"{self.context} was lost with its position: resume the run from its last checkpoint")

    @endpoint
    def sample(self) -> Sample:
        """Return the next `(prompt, target)`. Rows left out on the way are counted in `data/skipped`."""
        sample = self.again.popleft() if self.again else self._take_next("sample", "prompts")
        self.issued.append(sample)
        return sample

    @endpoint
    def supervised(self, n: int) -> list[Episode]:
        """Return the next n episodes to be imitated; fewer where the last epoch ends."""
        return self._draw_items(n, "supervised", "supervised")

    @endpoint
    def pairs(self, n: int) -> list[Episode]:
        """Return the next n pairs as 2n episodes: chosen, rejected, chosen, rejected; fewer where the last epoch
        ends."""
        drawn: list[Pair] = self._draw_items(n, "pairs", "preferences")
        return [episode for pair in drawn for episode in pair]

    @endpoint
    def observe(self, outcomes: Mapping[int, Sequence[float]]) -> None:
        """Tell the sampler of the data, if it has one, the rewards of groups by the indices of their prompts."""
        if isinstance(self.dataset, RowStream):
            self.dataset.observe(outcomes)

    @endpoint
    def forget(self, seen: Seen) -> None:
        """Drop the samples that are done with: they are never to be handed out again."""
        self.issued = deque((s for s in self.issued if s.prompt.index not in seen), self.issued.maxlen)

    @endpoint
    def state_dict(self, seen: Seen | None = None) -> dict[str, Any]:
        """Return the position in the stream, and the samples before it that may have to be handed out again.

        Args:
            seen: the indices that are done with; their samples are forgotten.
        """
        if seen is not None:
            self.forget(seen)
        return {"position": self.dataset.state_dict(), "issued": list(self.issued), "again": list(self.again)}

    @endpoint
    def load_state_dict(self, state: dict[str, Any], seen: Seen | None = None) -> list[int]:
        """Continue from a saved position.

        Args:
            seen: the indices that are done with: all others before the position are handed out again first. None says
                that all are.

        Returns:
            indices that would have to be handed out again, and that the state does not remember.
        """
        self.dataset.load_state_dict(state["position"])
        self.issued.clear()
        if seen is None:
            self.issued.extend(state["issued"])
            self.again = deque(state["again"])
            return []
        samples = {sample.prompt.index: sample for sample in [*state["issued"], *state["again"]]}
        pending = [index for index in range(seen.low, self.dataset.served) if index not in seen]
        self.again = deque(samples[index] for index in pending if index in samples)
        return [index for index in pending if index not in samples]

    def _draw_items(self, n: int, endpoint: str, kind: Kind) -> list[Any]:
        """ValueError: there is none left."""
        drawn: list[Any] = []
        while len(drawn) < n:
            try:
                drawn.append(self._take_next(endpoint, kind))
            except DataEnded:
                if not drawn:
                    raise
                break
        return drawn

    def _take_next(self, endpoint: str, kind: Kind) -> Any:
        if self.kind != kind:
            raise ValueError(f"{endpoint} needs a dataset of kind {kind}; this one is of {self.kind}")
        skipped = self.dataset.skipped
        try:
            item = next(self.dataset)
        except StopIteration:
            raise DataEnded("the data has ended: raise or unset epochs, or take fewer steps") from None
        record_metric("data/skipped", self.dataset.skipped - skipped, Reduce.SUM)
        return item
