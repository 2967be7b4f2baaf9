"""Weights of transformers' modules for the engine: one module for each version, filled while another decodes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from forge.engines.weights import checked_parts
from forge.models.find import quiet_loading
from forge.models.weight_layouts import FusedPart

from .attention import ENGINE, PROBE, Recorder, UnsupportedAttention, run_model, set_attention
from .modules import FusedNorm, set_weight, use_experts
from .states import RowsCache

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class Slot(NamedTuple):
    """Where a parameter belongs: all modules that share it, and its type."""

    places: list[tuple[str, str]]  # names of modules, and the parameter's name there
    dtype: torch.dtype


class Template:
    """A model without weights, from which that of each version is made, and what its forward pass asks of an engine.

    Attributes:
        calls: its attention calls, in order.
        states: those of its recurrent layers after a token of one row, (1, ...) each, as `RowsCache.states`; [] for a
            model without such layers.
        continues: whether several tokens may follow on such states; else they have to be computed one by one.
        vocab: the number of logits.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        """Ask a model with its weights what its forward pass needs, by a few tokens. `read_weights` takes the weights.

        Raises:
            ValueError: a feature that the engine does not compute; names it.
        """
        self.model = model.eval().to(device)  # type: ignore[arg-type]
        self.config: PreTrainedConfig = model.config
        set_attention(model, PROBE)
        recorder = Recorder()
        try:
            with torch.inference_mode():
                self.vocab, states = self._run_probe(recorder, [4])
                self.calls = list(recorder.calls)
                self.states = states if any(state is not None for state in states) else []
                pieces = self._run_probe(recorder, [2, 2])[1] if self.states else []
        except UnsupportedAttention as error:
            raise unsupported(model.config, str(error)) from None
        except Exception as error:  # modules that cannot do without transformers' own attention or cache
            raise unsupported(model.config, f"its modules ({' '.join(str(error).split())[:160]})") from error
        self.continues = all(is_close(*pair) for pair in zip(self.states, pieces, strict=True))
        if not self.calls and not self.states:
            raise unsupported(model.config, "attention outside transformers' interface")
        most = max((call.kv_heads for call in self.calls), default=1)
        if any(most % call.kv_heads or call.heads % most for call in self.calls):
            raise unsupported(model.config, "layers whose numbers of heads do not divide one another")

        set_attention(model, ENGINE)
        if device.type == "cpu":
            use_experts(model)
            FusedNorm.replace_norms(model)
        places: dict[int, list[tuple[str, str]]] = {}
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                places.setdefault(id(parameter), []).append((path, name))
        self.slots = {name: Slot(places[id(p)], p.dtype) for name, p in model.named_parameters()}
        self.table = {
            name: (FusedPart(name, 1, tuple(p.shape), repeated=True),) for name, p in model.named_parameters()
        }

    def _run_probe(self, recorder: Recorder, lengths: Sequence[int]) -> tuple[int, list[Tensor | None]]:
        """Run a few tokens in pieces of these lengths; return the number of logits, and the states."""
        cache = RowsCache(self.config)
        start = 0
        for length in lengths:
            positions = torch.arange(start, start + length, device=self.model.device)[None]
            logits = run_model(recorder, self.model, positions + 1, positions, cache).logits
            start += length
        return logits.shape[-1], cache.states()

    def read_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the (name, tensor) of each weight of the model, and drop it there."""
        for name, slot in self.slots.items():
            parameter = self.model.get_parameter(name)
            yield name, parameter.detach()
            empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
            for path, attribute in slot.places:
                setattr(self.model.get_submodule(path), attribute, empty)


class ModuleWeights:
    """All weights of one policy version, with its number and identity, as `forge.engines.weights.Weights`."""

    def __init__(
        self,
        template: Template,
        config: PreTrainedConfig,
        named_tensors: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype,
        device: torch.device,
        version: int = 0,
        identity: str = "",
    ):
        """Read all weights into a module like the template's, and pack them for decoding.

        Args:
            named_tensors: (name, tensor) of every parameter, by its name in transformers' module, shared ones once.

        Raises:
            ValueError: an unknown, duplicate or missing name, or a wrong shape; the message names the tensor.
        """
        self.version = version
        self.identity = identity
        buffers: dict[int, Any] = {id(buffer): buffer for buffer in template.model.buffers()}
        self.model = copy.deepcopy(template.model, buffers)
        with torch.no_grad():
            for name, _, tensor in checked_parts(template.table, named_tensors, tied=False):
                places, kind = template.slots[name]
                weight = tensor.detach().to(device, kind, copy=True)
                for path, attribute in places:
                    set_weight(self.model.get_submodule(path), attribute, weight)


def is_close(state: Tensor | None, other: Tensor | None) -> bool:
    """Return whether a state is another one up to rounding in any type."""
    return state is None or other is None or bool((state - other).norm() <= 0.05 * state.norm())


def unsupported(config: PreTrainedConfig, feature: str) -> ValueError:
    """Return the error about a feature of a model that the engine does not compute."""
    name = config.name_or_path or "the model"
    return ValueError(f"{name} ({config.model_type}): the embedded engine does not support {feature}")


def read_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the model of a folder, as transformers loads it."""
    from transformers import AutoModelForCausalLM

    with quiet_loading():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=False, use_safetensors=True
        )
    return model


def read_parameters(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the (name, tensor) of each weight of a folder by its name in transformers' module, shared ones once."""
    for name, parameter in read_model(folder).named_parameters():
        yield name, parameter.detach()
