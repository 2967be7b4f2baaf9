"""Weights of transformers' modules for the engine: one module for each version, filled while another decodes."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from forge.engines.weights import checked_parts
from forge.models.find import quiet_loading
from forge.models.tokenizer import model_class
from forge.models.weight_layouts import FusedPart

from .attention import ENGINE, PROBE, AttentionCall, UnsupportedModel, record_call, run_model, set_attention
from .modules import FusedNorm, set_weight, use_experts
from .states import RowStates, States


class Template:
    """Model without weights, from which the model of each weight version is made.

    Attributes:
        vocab: the number of logits.
        is_packed: whether linear layers and experts multiply by the engine's packed weights.
        places: of each parameter, by name: all modules that share it, each with its name there.
        table: the parameters and their shapes, as `forge.models.weight_layouts.engine_layout`.
    """

    is_packed = False

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        """Probe the forward pass of a loaded model with a few tokens, and take over the model's weights.

        Raises:
            UnsupportedModel: a feature that the engine does not compute.
        """
        self.model = model.eval().to(device)  # type: ignore[arg-type]
        self.config: PreTrainedConfig = model.config
        with torch.inference_mode():
            self._inspect_model()

        shared: dict[int, list[tuple[str, str]]] = {}
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                shared.setdefault(id(parameter), []).append((path, name))
        parameters = dict(model.named_parameters())
        self.places = {name: shared[id(parameter)] for name, parameter in parameters.items()}
        self.table = {n: (FusedPart(n, 1, tuple(p.shape), repeated=True),) for n, p in parameters.items()}

        # Copies of the model have places for weights, and no weights.
        self._loaded = {name: parameter.detach() for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
            for path, attribute in self.places[name]:
                setattr(model.get_submodule(path), attribute, empty)

    def read_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the (name, tensor) of each weight that the model had, once."""
        while self._loaded:
            yield self._loaded.popitem()

    def _inspect_model(self) -> None:
        set_attention(self.model, "eager")
        self.vocab = self.model(
            input_ids=torch.full((1, 1), 4, device=self.model.device), use_cache=False
        ).logits.shape[-1]


class AttentionTemplate(Template):
    """A template of a model whose attention and states are the engine's.

    Attributes:
        calls: its calls of attention, in order.
        states: those of its recurrent layers after a few tokens of one row; [] for a model without such layers.
        continues: whether several tokens may follow on such states; else they have to be computed one by one.
        offset: the position of the first token.
    """

    is_packed = True

    def _inspect_model(self) -> None:
        set_attention(self.model, PROBE)
        self.calls: list[AttentionCall] = []
        self.vocab, states = self._run_probe(self.calls, [4])
        self.states = states if any(state is not None for state in states) else []
        pieces = self._run_probe([], [2, 2])[1] if self.states else []
        self.offset = self._find_offset()
        self.continues = all(
            state is None or other is None or bool((state - other).norm() <= 0.05 * state.norm())
            for state, other in zip(self.states, pieces, strict=True)
        )
        if not self.calls and not self.states:
            raise UnsupportedModel("attention outside transformers' interface")
        most = max((call.kv_heads for call in self.calls), default=1)
        if any(most % call.kv_heads or call.heads % most for call in self.calls):
            raise UnsupportedModel("layers whose numbers of heads do not divide one another")

        set_attention(self.model, ENGINE)
        if self.model.device.type == "cpu":
            use_experts(self.model)
            FusedNorm.replace_norms(self.model)

    def _run_probe(self, calls: list[AttentionCall], lengths: Sequence[int]) -> tuple[int, States]:
        """Run a few tokens in pieces of these lengths; return the number of logits, and the states."""
        states = RowStates(self.config)
        for start, length in zip((0, *lengths), lengths, strict=False):
            positions = torch.arange(start, start + length, device=self.model.device)[None]
            logits = run_model(partial(record_call, calls), self.model, positions + 1, positions, states).logits
        return logits.shape[-1], states.read()

    def _find_offset(self) -> int:
        """Return the position that a model assigns to its first token, which some models count from the padding token's
        id."""
        tokens = torch.arange(4, 8, device=self.model.device)[None]
        expected, *logits = (
            run_model(partial(record_call, []), self.model, tokens, positions, RowStates(self.config)).logits
            for positions in (None, *(torch.arange(4, device=self.model.device)[None] + offset for offset in range(4)))
        )
        return next((offset for offset, result in enumerate(logits) if torch.allclose(result, expected)), 0)


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
                weight = tensor.detach().to(device, self.model.get_parameter(name).dtype, copy=True)
                for path, attribute in template.places[name]:
                    set_weight(self.model.get_submodule(path), attribute, weight, template.is_packed)


def read_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the model of a folder, as transformers loads it.

    Raises:
        ValueError: a weight is missing; names it.
    """
    with quiet_loading():
        model, info = model_class(AutoConfig.from_pretrained(folder, trust_remote_code=False)).from_pretrained(
            folder, dtype=dtype, trust_remote_code=False, use_safetensors=True, output_loading_info=True
        )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{folder}: weight {missing[0]!r} is missing; in all {len(missing)} are")
    return model  # type: ignore[no-any-return]


def read_parameters(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the (name, tensor) of each weight of a folder by its name in transformers' module, shared ones once."""
    for name, parameter in read_model(folder).named_parameters():
        yield name, parameter.detach()
