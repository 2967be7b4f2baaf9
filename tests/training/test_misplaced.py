"""Faults that only an accelerator shows, put in on purpose: each fails a check of the emulated one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge.engines import batch, rows
from forge.engines.interface import EngineFailed
from forge.runtime.store import VersionStore, transfer
from forge.training import flex, policy, step, trainer
from forge.training.optimizers import MixedAdamW
from tests.emulated import DeviceMix, emulated
from tests.engines import test_emulated as engines
from tests.runtime.store import test_emulated as stores
from tests.training.test_emulated import SETTINGS, check_step, check_waits, train

Place = Callable[[pytest.MonkeyPatch], None]
Check = Callable[[Path, Path], None]


def in_place_of(owner: Any, name: str, make: Callable[[Any], Any]) -> Place:
    """A function or method replaced by what `make` returns for it."""
    return lambda patch: patch.setattr(owner, name, make(getattr(owner, name)))


def left_behind(module: Any, name: str) -> Place:
    """A tensor that a module's `to_device` leaves in host memory."""

    def make(to_device: Any) -> Any:
        return lambda tensors, device: (
            to_device(tensors, device) | {key: tensors[key] for key in tensors if key == name}
        )

    return in_place_of(module, "to_device", make)


def moved(state: Callable[[torch.device], bool], buffers: str | None = None) -> Place:
    """Moves of a trainer that omit the state of its optimiser, or take its buffers to another device."""

    def make(move: Any) -> Any:
        def part(model: Any, optimizer: Any, to: torch.device, **_: Any) -> None:
            move(model, optimizer if state(to) else SimpleNamespace(state={}), to, buffers and torch.device(buffers))

        return part

    return in_place_of(trainer, "move", make)


def with_read(function: Any) -> Any:
    """The function, whose result the host reads."""

    def read(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        (result[0] if isinstance(result, tuple) else result).sum().item()
        return result

    return read


def on_cpu(begin: Any) -> Any:
    """An optimiser's state, in host memory."""
    return lambda self, *args: {name: value.cpu() for name, value in begin(self, *args).items()}


def by_mask(add: Any) -> Any:
    """Metrics whose elements a mask selects: the host has to know their number."""
    return lambda self, name, values, chosen=None: add(self, name, values if chosen is None else values[chosen])


def one_by_one(_: Any) -> Any:
    """A blocking copy of each tensor."""
    return lambda tensors, device: {name: tensor.to(device) for name, tensor in tensors.items()}


def cast_on_cpu(copy_and_hash: Any) -> Any:
    """A copy to host memory that casts there."""
    return lambda source, target, *args: copy_and_hash(target.copy_(source), target, *args)


def places(which: str) -> Check:
    return lambda model, _: check_step(model, train(model, **SETTINGS[which]), **SETTINGS[which])


def waits(model: Path, _: Path) -> None:
    check_waits(model)


def decode(_: Path, folder: Path) -> None:
    engines.random_model(**engines.MODELS["qwen3"]).save_pretrained(folder / "qwen3")
    with emulated():
        engines.decode(folder / "qwen3")


def decode_waits(model: Path, _: Path) -> None:
    engines.check_waits(model, 1, top_k=5)


def put(model: Path, folder: Path) -> None:
    store = VersionStore(folder)
    store.prepare()
    stores.check_put(store, stores.weights(model), torch.bfloat16)


FAULTS: dict[str, tuple[Place, Check, type[Exception], str]] = {
    "labels": (left_behind(policy, "labels"), places("full"), DeviceMix, r"linear\.py"),
    "advantages": (left_behind(step, "advantages"), places("full"), DeviceMix, r"grpo\.py|terms\.py|losses"),
    "masks of metrics": (left_behind(trainer, "current"), places("full"), DeviceMix, r"step\.py"),
    "blocks of attention": (left_behind(flex, "kv_indices"), places("full"), DeviceMix, "FlexAttention"),
    "state that stays on the device": (moved(lambda to: False), places("full"), AssertionError, "of parameter 0"),
    "state that stays in host memory": (
        moved(lambda to: to.type == "cpu"),
        places("lora"),
        AssertionError,
        "of parameter 0",
    ),
    "buffers": (moved(lambda to: True, "cpu"), places("full"), AssertionError, "inv_freq"),
    "new state": (
        in_place_of(MixedAdamW, "_make_state", on_cpu),
        places("full"),
        DeviceMix,
        r"optimizers\.py",
    ),
    "a read": (in_place_of(trainer, "micro_batch_loss", with_read), waits, AssertionError, "item"),
    "many copies": (in_place_of(step, "to_device", one_by_one), waits, AssertionError, "to the device"),
    "a mask as an index": (in_place_of(step.Metrics, "add", by_mask), waits, AssertionError, "index by a mask"),
    "rows of the engine": (
        in_place_of(rows, "draw", lambda draw: lambda logits, uniform, greedy: draw(logits, uniform.cpu(), greedy)),
        decode,
        EngineFailed,
        "DeviceMix",
    ),
    "indices of the engine": (
        in_place_of(batch.RunningBatch, "_index", lambda _: lambda self, rows: torch.tensor(rows)),
        decode_waits,
        AssertionError,
        "index on the CPU",
    ),
    "a read of the engine": (in_place_of(rows, "draw", with_read), decode_waits, AssertionError, "item"),
    "casts": (in_place_of(transfer, "copy_and_hash", cast_on_cpu), put, AssertionError, "with a cast by the CPU"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, mild: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place, check, error, message = FAULTS[fault]
    place(monkeypatch)
    with pytest.raises(error, match=message):
        check(mild["qwen3"], tmp_path)
