"""The data of a run as an actor, in a fixed order that can be resumed at every position."""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..data.files import PathOrRows, read_path_or_rows
from ..data.load import Data, Kind, check_settings, load_data
from ..data.stream import RowStream
from ..models.tokenizer import open_tokenizer
from ..observability import Reduce, record_metric
from ..runtime.controller import ForgeActor, Unrecoverable, endpoint
from ..types import Episode, Sample, Seen


class DataEnded(ValueError):
    """Signal that all epochs of the dataset have been read."""


class DatasetActor(ForgeActor):
    """Component that returns samples, episodes or pairs of a dataset in a fixed, resumable order.

    It lives in the controller (`as_local`), where its plain endpoints run in a thread so that tokenising does not block
    the event loop, or in a separate process (`as_actor`), whose loss ends the run.

    Args:
        tokenizer: Hugging Face folder or hub id of the tokenizer.
        path: the rows themselves, or the file, folder or hub id that has them.
        kind: "prompts" (read by `sample`), "supervised" (by `supervised`) or "preferences" (by `pairs`).
        sources: several datasets that are mixed in given shares, see `forge.data.load.load_data`.
        remember: number of the latest samples that are kept. After a resume those whose rollouts were not finished when
            the state was saved are handed out again.
        **dataset: further settings of `PromptDataset`, `SupervisedDataset` or `PreferenceDataset`, such as `checked`.
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
                "the first argument of DatasetActor must be a model (directory or hub id), the second the rows, got "
                f"{tokenizer!r:.80}"
            )

        self.tokenizer_path, self.kind = tokenizer, kind
        self.settings = {"path": read_path_or_rows(path), "sources": sources, **dataset}
        check_settings(kind, self.settings)
        self.issued: deque[Sample] = deque(maxlen=remember)
        self.again: deque[Sample] = deque()  # samples to hand out again before the stream continues

    def setup(self) -> None:
        """Open the tokenizer and the data; raises the errors of `forge.data.load.load_data`."""
        self.dataset: Data = load_data(open_tokenizer(self.tokenizer_path), kind=self.kind, **self.settings)

    def on_respawn(self) -> None:
        """Raise Unrecoverable: the position in the data was lost with the process."""
        raise Unrecoverable(
            f"{self.context} died and its position in the data is lost: resume the run from its last checkpoint"
        )

    @endpoint
    def sample(self) -> Sample:
        """Return the next sample, a prompt with its target. The metric `data/skipped` counts rows that are left out."""
        sample = self.again.popleft() if self.again else self._take_next("sample", "prompts")
        self.issued.append(sample)
        return sample

    @endpoint
    def supervised(self, n: int) -> list[Episode]:
        """Return the next n episodes of supervised data; fewer at the end of the last epoch.

        Raises:
            DataEnded: none is left.
        """
        return self._draw_items(n, "supervised", "supervised")

    @endpoint
    def pairs(self, n: int) -> list[Episode]:
        """Return the next n pairs as 2n episodes: chosen, rejected, chosen, rejected, ...

        They are fewer at the end of the last epoch.

        Raises:
            DataEnded: none is left.
        """
        return [episode for pair in self._draw_items(n, "pairs", "preferences") for episode in pair]

    @endpoint
    def observe(self, outcomes: Mapping[int, Sequence[float]]) -> None:
        """Pass the outcomes of finished groups to the row sampler, if `dataset.sampler` is set.

        Args:
            outcomes: of each group, by the index of its prompt.
        """
        if isinstance(self.dataset, RowStream):
            self.dataset.observe(outcomes)

    @endpoint
    def forget(self, seen: Seen) -> None:
        """Drop the remembered samples of finished prompts, which a resumed run does not need again.

        Args:
            seen: the indices of these prompts.
        """
        self.issued = deque((s for s in self.issued if s.prompt.index not in seen), self.issued.maxlen)

    @endpoint
    def state_dict(self, seen: Seen | None = None) -> dict[str, Any]:
        """Return the position in the data, and the earlier samples that a resumed run may have to return again.

        Args:
            seen: the indices of finished prompts, whose samples are dropped; see `forget`.
        """
        if seen is not None:
            self.forget(seen)
        return {"position": self.dataset.state_dict(), "issued": list(self.issued), "again": list(self.again)}

    @endpoint
    def load_state_dict(self, state: dict[str, Any], seen: Seen | None = None) -> list[int]:
        """Continue from a saved position in the data.

        Args:
            state: what `state_dict` returned.
            seen: the indices of finished prompts; the samples of all others before the position are handed out again
                first. None: all are finished, except those that the state was still to hand out again.

        Returns:
            The indices of unfinished prompts whose samples the state does not remember.
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
        """Return the next n items, fewer at the end of the data; DataEnded: none is left."""
        items = [self._take_next(endpoint, kind) for _ in range(min(n, 1))]
        with suppress(DataEnded):
            while len(items) < n:
                items.append(self._take_next(endpoint, kind))
        return items

    # Return the next item for an endpoint that reads data of this kind; DataEnded: none is left.
    def _take_next(self, endpoint: str, kind: Kind) -> Any:
        if self.kind != kind:
            raise ValueError(
                f"{endpoint} needs a dataset of kind {kind}, and this dataset has kind {self.kind}: set dataset.kind "
                f"to {kind}"
            )

        skipped = self.dataset.skipped
        try:
            item = next(self.dataset)
        except StopIteration:
            raise DataEnded("the dataset has ended: raise or unset dataset.epochs, or lower training.steps") from None
        record_metric("data/skipped", self.dataset.skipped - skipped, Reduce.SUM)
        return item
