"""The embedded engine for models of transformers' own modules: opened from a folder, and checked before a run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .attention import UnsupportedModel
from .decoder import ModuleDecoder
from .probe import build_small_model
from .weights import ModuleWeights, Template, read_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# The most that log-probabilities may differ from those of transformers' forward pass, for large random weights.
MAX_DIFFERENCE = 1e-3
STEPS = 12  # of decoding that are compared
Opened = tuple[Callable[..., ModuleWeights], Callable[..., ModuleDecoder], Iterator[tuple[str, Tensor]]]

_checked: set[str] = set()  # configs, by their values


def open_model(folder: Path, dtype: torch.dtype, device: torch.device) -> Opened:
    """Return what makes the weights and the decoder of a model, as the core's classes, and the (name, tensor) of each
    weight in its folder.

    Raises:
        ValueError: a weight is missing, or a feature that the engine does not compute.
    """
    template = Template(read_model(folder, dtype), device)
    return partial(ModuleWeights, template), partial(ModuleDecoder, template), template.read_weights()


def check_engine(config: PreTrainedConfig) -> None:
    """Check that the engine computes the models of a config, by a narrow model of its class with random weights.

    Raises:
        ValueError: it does not; names the feature, or the difference from transformers.
    """
    if (key := config.to_json_string(use_diff=False)) in _checked:
        return
    try:
        difference = measure_difference(build_small_model(config))
        feature = "" if difference <= MAX_DIFFERENCE else f"this model: log-probabilities differ by {difference:.2g}"
    except UnsupportedModel as error:
        feature = str(error)
    except Exception as error:  # modules that cannot do without transformers' own attention or cache
        feature = f"this model's modules ({type(error).__name__}: {' '.join(str(error).split())[:160]})"
    if feature:
        name = f"{config.name_or_path or 'the model'} ({config.model_type})"
        raise ValueError(f"{name}: the embedded engine does not support {feature}")
    _checked.add(key)


def measure_difference(model: PreTrainedModel) -> float:
    """Return the largest difference of the engine's log-probabilities from those of a model's forward pass.

    Two sequences of different lengths are prefilled, the longer one in two pieces, and decoded together.

    Raises:
        UnsupportedModel: a feature that the engine does not compute.
    """
    device = torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    highest = model.config.get_text_config().vocab_size
    tokens = [torch.randint(3, highest, (length,), generator=generator) for length in (48, 27)]
    with torch.inference_mode():
        expected = [model(input_ids=ids[None]).logits[0, -STEPS:].float().log_softmax(-1) for ids in tokens]
    template = Template(copy.deepcopy(model), device)
    weights = ModuleWeights(template, model.config, template.read_weights(), torch.float32, device)
    decoder = ModuleDecoder(template, model.config, weights, 2, 64, torch.float32, device)

    with torch.inference_mode():
        longer, shorter = (ids[:-STEPS].tolist() for ids in tokens)
        decoder.prefill([longer[:20], shorter], [0, 1])
        decoder.prefill([longer[20:]], [0], [20])
        positions = torch.tensor([len(longer), len(shorter)])
        steps = zip(*(ids[-STEPS:] for ids in tokens), strict=True)
        logits = [decoder.decode(torch.stack(step), positions + i, 64) for i, step in enumerate(steps)]
        # Of the tokens that follow: those of improbable ones, of which no request asks, have larger roundings.
        following = torch.stack([ids[-STEPS + 1 :] for ids in tokens])[..., None]
        differences = torch.stack(logits, 1).log_softmax(-1) - torch.stack(expected)
        return float(differences[:, :-1].gather(2, following).abs().max())
