"""The data of a run from its settings: one dataset, or a mixture of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from forge.data.dataset import PromptDataset
from forge.data.mixture import Mixture
from forge.data.preferences import PreferenceDataset
from forge.data.supervised import SupervisedDataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kind = Literal["prompts", "supervised", "preferences"]
Data = PromptDataset | SupervisedDataset | PreferenceDataset | Mixture

KINDS = {"prompts": PromptDataset, "supervised": SupervisedDataset, "preferences": PreferenceDataset}


def load_data(
    tokenizer: PreTrainedTokenizerBase,
    *,
    kind: Kind = "prompts",
    sources: Sequence[Mapping[str, Any]] | None = None,
    **settings: Any,
) -> Data:
    """Open and check the data, see the three datasets for what is refused and how.

    Args:
        kind: what it is made of: prompts with targets, episodes to imitate, or pairs of episodes.
        sources: settings of several datasets, over the common `settings`, and `weight`: its share of the items, 1
            where it is not given.
        **settings: of the dataset.

    Raises:
        ValueError, FileNotFoundError, ImportError: what is wrong, in one line; of several sources, in which.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    made = KINDS[kind]
    if sources is None:
        return made(tokenizer=tokenizer, **settings)
    if settings.get("path") is not None or settings.get("task") is not None:
        raise ValueError("with sources, path and task belong to each of them")
    opened: list[Any] = []
    for number, source in enumerate(sources, 1):
        own = {name: value for name, value in {**settings, **source}.items() if name != "weight"}
        try:
            opened.append(made(tokenizer=tokenizer, **own))
        except (ValueError, TypeError) as error:
            raise ValueError(f"source {number}: {error}") from error
        except (FileNotFoundError, ImportError) as error:
            raise type(error)(f"source {number}: {error}") from error
    return Mixture(opened, [source.get("weight", 1.0) for source in sources])
