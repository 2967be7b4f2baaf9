"""Open the data of a run: one dataset, or a weighted mixture of several."""

import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from ..config.sections import build
from ..types import Sample
from .preferences import PreferenceDataset
from .prompts import PromptDataset
from .sources import Position
from .stream import RowStream
from .supervised import SupervisedDataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


class Mixture(Generic[T]):
    """Iterator over the items of several weighted sources, which ends when the next source in turn is exhausted.

    Every source keeps its own order and epochs. The next source is deterministic: after k items, the number of items
    from each source is within one of its share of k (Tijdeman 1980, The chairman assignment problem). Samples are
    numbered across sources, since a replay buffer accepts every number once.

    Args:
        sources: datasets.
        weights: a finite number above 0 for each source; None gives equal shares.

    Raises:
        ValueError: no sources, or weights that do not fit them.
    """

    def __init__(self, sources: Sequence[RowStream[T, Any]], weights: Sequence[float] | None = None) -> None:
        numbers = [1.0] * len(sources) if weights is None else list(weights)
        if not sources or len(numbers) != len(sources):
            raise ValueError(
                f"a mixture needs at least one source and one weight for each, got {len(sources)} sources and "
                f"{len(numbers)} weights"
            )

        for number, weight in enumerate(numbers, 1):
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise ValueError(f"source {number}: weight must be a finite number above 0, got {weight!r}")

        # Exact shares: floating-point ones would drift from the schedule over a long run.
        total = sum(Fraction(str(weight)) for weight in numbers)
        self.sources, self.shares = list(sources), [Fraction(str(weight)) / total for weight in numbers]
        self.counts = [0] * len(sources)

    @property
    def served(self) -> int:
        """Return the number of items returned so far."""
        return sum(self.counts)

    @property
    def skipped(self) -> int:
        """Return the total number of rows that the sources skipped."""
        return sum(source.skipped for source in self.sources)

    @property
    def size(self) -> int | None:
        """Return the number of items of the whole iteration; None: endless, or unknown."""
        counts, sizes = [0] * len(self.sources), [source.size for source in self.sources]
        if all(size is None for size in sizes):
            return None
        # Count as `__next__` does, until it is the turn of a source that has ended.
        while counts[next_source := self._next_source(counts)] != sizes[next_source]:
            counts[next_source] += 1
        return sum(counts)

    def has(self, item: object) -> bool:
        """Return whether an item has the same tokens as an item that a source made in its initial check."""
        return any(source.has(item) for source in self.sources)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        source = self._next_source(self.counts)
        item = _renumber_item(next(self.sources[source]), self.served)
        self.counts[source] += 1
        return item

    def held_out(self, n: int) -> list[T]:
        """Return n items for evaluation, the same at every call, with each source's share. ValueError: a source has too
        few."""
        counts, order = [0] * len(self.sources), []
        for _ in range(n):
            order.append(self._next_source(counts))
            counts[order[-1]] += 1
        streams = [iter(source.held_out(count)) for source, count in zip(self.sources, counts, strict=True)]
        return [_renumber_item(next(streams[number]), index) for index, number in enumerate(order)]

    def targets(self) -> Iterator[str]:
        """Return an iterator of the targets of all sources of prompts."""
        return chain.from_iterable(source.targets() for source in self.sources if isinstance(source, PromptDataset))

    def state_dict(self) -> Position:
        """Return the position in all sources, as plain JSON."""
        return {
            "shares": [str(share) for share in self.shares],
            "counts": list(self.counts),
            "sources": [source.state_dict() for source in self.sources],
        }

    def load_state_dict(self, state: Position) -> None:
        """Continue where `state_dict` returned this state. ValueError: the sources or weights differ."""
        was, now = state.get("shares"), [str(share) for share in self.shares]
        if was != now:
            raise ValueError(
                f"the checkpoint's data position is of a mixture with shares {was}, but the configured shares are "
                f"{now}: resume with the same dataset.sources"
            )
        for source, saved in zip(self.sources, state["sources"], strict=True):
            source.load_state_dict(saved)
        self.counts = list(state["counts"])

    def _next_source(self, counts: Sequence[int]) -> int:
        """Return the index of the source of the next item, after `counts` items of each source: among those that are
        not too far ahead of their share, the one with the earliest deadline."""
        slack = Fraction(1, max(2, 2 * len(counts) - 2))
        now = sum(counts) + 1  # number of the next item
        # Tijdeman's rule: a source is ready once it is `slack` items behind its share, and its deadline is the item at
        # which it would be 1 - `slack` items behind.
        ready = [source for source, share in enumerate(self.shares) if share * now - counts[source] >= slack]
        return min(ready, key=lambda source: (counts[source] + 1 - slack) / self.shares[source])


def _renumber_item(item: Any, index: int) -> Any:
    if not isinstance(item, Sample):  # only samples are numbered
        return item
    return item._replace(prompt=dataclasses.replace(item.prompt, index=index))


Kind = Literal["prompts", "supervised", "preferences"]
Data = PromptDataset | SupervisedDataset | PreferenceDataset | Mixture

KINDS = {"prompts": PromptDataset, "supervised": SupervisedDataset, "preferences": PreferenceDataset}


def find_dataset_class(kind: Kind) -> Any:
    """Return the dataset class of a kind, such as PromptDataset of "prompts". ValueError: the kind is unknown."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    return KINDS[kind]


def check_settings(kind: Kind, settings: Mapping[str, Any]) -> None:
    """Check the settings of a dataset without opening it.

    Raises:
        ValueError, ConfigError: an unknown kind or key, or a wrong value.
    """
    dataset_class = find_dataset_class(kind)
    arguments = inspect.signature(dataset_class).parameters.keys() | inspect.signature(RowStream).parameters.keys()
    values = {name: value for name, value in settings.items() if name not in arguments - {"path"}}
    build(dataset_class.SECTION, values, "dataset")


def load_data(
    tokenizer: "PreTrainedTokenizerBase",
    *,
    kind: Kind = "prompts",
    sources: Sequence[Mapping[str, Any]] | None = None,
    **settings: Any,
) -> Data:
    """Open and check a dataset, or a `Mixture` of several.

    Args:
        kind: of the items: "prompts" with targets, "supervised" episodes, or "preferences", pairs of episodes.
        sources: for a mixture, the settings of each dataset, which override the common `settings`, and its `weight`
            (default 1); None: one dataset.
        **settings: of the dataset.

    Raises:
        ValueError, FileNotFoundError, ImportError: one line, which names the number of a source if there are several.
    """
    dataset_class = find_dataset_class(kind)
    if sources is None:
        return dataset_class(tokenizer=tokenizer, **settings)
    if settings.get("sampler") is not None or any(source.get("sampler") is not None for source in sources):
        raise ValueError(
            "dataset.sampler cannot be combined with dataset.sources: put all rows into one file, and use the "
            "sampler mix"
        )

    if settings.get("path") is not None or settings.get("task") is not None:
        raise ValueError("with dataset.sources, set path or task in each source instead of in dataset")

    # Each source's settings override the common ones; its errors name it.
    opened: list[Any] = []
    for number, source in enumerate(sources, 1):
        source_settings = {name: value for name, value in {**settings, **source}.items() if name != "weight"}
        try:
            opened.append(dataset_class(tokenizer=tokenizer, **source_settings))
        except (ValueError, TypeError) as error:
            raise ValueError(f"source {number}: {error}") from error
        except (FileNotFoundError, ImportError) as error:
            raise type(error)(f"source {number}: {error}") from error

    return Mixture(opened, [source.get("weight", 1.0) for source in sources])
