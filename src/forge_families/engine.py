"""The embedded engine for models of transformers' own modules: opened from a folder, and checked before a run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge.models.find import quiet_loading

from .decoder import ModuleDecoder
from .probe import build_small_model
from .weights import ModuleWeights, Template, read_model, unsupported

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# The most that log-probabilities may differ from those of transformers' forward pass, for large random weights.
MAX_DIFFERENCE = 2e-3
_differences: dict[str, float] = {}  # by the config's values
Opened = tuple[Callable[..., ModuleWeights], Callable[..., ModuleDecoder], Iterator[tuple[str, Tensor]]]


def open_model(folder: Path, dtype: torch.dtype, device: torch.device) -> Opened:
    """Return what makes the weights and the decoder of a model, as the classes of the native tier, and the (name,
    tensor) of each weight in its folder.

    Raises:
        ValueError: a feature that the engine does not compute.
    """
    template = Template(read_model(folder, dtype), device)
    return partial(ModuleWeights, template), partial(ModuleDecoder, template), template.read_weights()


def check_engine(config: PreTrainedConfig) -> None:
    """Check that the engine computes the models of a config, by a narrow model of its class with random weights.

    Raises:
        ValueError: it does not; names the feature, or the difference from transformers.
    """
    key = config.to_json_string(use_diff=False)
    if key not in _differences:
        with quiet_loading():
            _differences[key] = measure_difference(build_small_model(config))
    if not _differences[key] <= MAX_DIFFERENCE:
        difference = f"the log-probabilities of a small one differ by {_differences[key]:.2g} from transformers'"
        raise unsupported(config, f"models of this kind: {difference}")


def measure_difference(model: PreTrainedModel) -> float:
    """Return the largest difference of the engine's log-probabilities from those of a model's forward pass.

    Two sequences of different lengths are prefilled, the longer one in two pieces, and decoded together.

    Raises:
        ValueError: a feature that the engine does not compute.
    """
    device, config = torch.device("cpu"), model.config
    generator = torch.Generator().manual_seed(0)
    highest = config.get_text_config().vocab_size
    tokens = [torch.randint(3, highest, (length,), generator=generator) for length in (48, 27)]
    with torch.inference_mode():
        expected = [model(input_ids=ids[None]).logits[0].float().log_softmax(-1) for ids in tokens]
    template = Template(copy.deepcopy(model), device)
    weights = ModuleWeights(template, config, template.read_weights(), torch.float32, device)
    decoder = ModuleDecoder(template, config, weights, 2, 64, torch.float32, device)

    with torch.inference_mode():
        first = [len(ids) - 12 for ids in tokens]
        decoder.prefill([tokens[0][:20].tolist(), tokens[1][: first[1]].tolist()], [0, 1])
        decoder.prefill([tokens[0][20 : first[0]].tolist()], [0], [20])
        differences = []
        for step in range(12):
            positions = torch.tensor(first) + step
            inputs = torch.stack([ids[position] for ids, position in zip(tokens, positions, strict=True)])
            logprobs = decoder.decode(inputs, positions, 64).log_softmax(-1)
            for row, position in enumerate(positions):
                differences.append((logprobs[row] - expected[row][position]).abs().max())

    return float(torch.stack(differences).max())
