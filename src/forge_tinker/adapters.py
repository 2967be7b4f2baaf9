"""Adapters: the factors that a tenant trains, with their optimiser, and their folders in peft's format."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from forge.models.weight_layouts import read_adapters

ALPHA = 32.0  # an update is scaled by ALPHA / rank, as in the hosted service
WEIGHTS, OPTIMIZER = "adapter_model.safetensors", "optimizer.safetensors"


class Adapter:
    """The factors of a tenant's model, with their optimiser.

    Args:
        factors: A (rank, in) and B (out, rank) of each adapted layer, by its path.
        rank: of all of them.
    """

    def __init__(self, factors: Mapping[str, tuple[Tensor, Tensor]], rank: int) -> None:
        self.factors = {path: (nn.Parameter(a), nn.Parameter(b)) for path, (a, b) in factors.items()}
        self.rank = rank
        self.optimizer = torch.optim.AdamW(self.parameters)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return all factors in order."""
        return [factor for pair in self.factors.values() for factor in pair]

    def step(self, settings: Mapping[str, float]) -> dict[str, float]:
        """Apply the accumulated gradient by AdamW with the settings of the protocol's `AdamParams`; return metrics.

        Raises:
            ValueError: the gradient is not finite; it is dropped, and nothing changes.
        """
        limit = settings["grad_clip_norm"]
        norm = float(nn.utils.clip_grad_norm_(self.parameters, limit if limit > 0 else float("inf")))
        if norm != norm or norm == float("inf"):
            self.optimizer.zero_grad()
            raise ValueError(f"the gradient's norm is {norm}: the step was not applied, and its gradient is dropped")
        self.optimizer.param_groups[0].update(
            lr=settings["learning_rate"],
            betas=(settings["beta1"], settings["beta2"]),
            eps=settings["eps"],
            weight_decay=settings["weight_decay"],
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"grad_norm:mean": norm}

    def save(self, folder: Path, base: str, *, optimizer: bool) -> int:
        """Write the adapter as a folder of peft's format, atomically, and return its bytes.

        Args:
            base: name of the base model.
            optimizer: write the optimiser's state as well.
        """
        unfinished = folder.with_name(folder.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        tensors = {
            f"base_model.model.{path}.lora_{letter}.weight": factor.detach().cpu()
            for path, pair in self.factors.items()
            for letter, factor in zip("AB", pair, strict=True)
        }
        save_file(tensors, unfinished / WEIGHTS)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": ALPHA,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": [*self.factors],
        }
        (unfinished / "adapter_config.json").write_text(json.dumps(config, indent=2))

        if optimizer:
            state = self.optimizer.state_dict()["state"]
            moments = {f"{index}.{name}": value for index, values in state.items() for name, value in values.items()}
            save_file(moments, unfinished / OPTIMIZER)
        size = sum(path.stat().st_size for path in unfinished.iterdir())
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
        return size

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read the factors of a folder that `save` wrote, and the optimiser's state or a new one.

        Raises:
            ValueError: the folder's adapter has other layers or another rank, or no optimiser state.
        """
        tensors = read_factors(folder)
        if {path: len(a) for path, (a, _) in tensors.items()} != dict.fromkeys(self.factors, self.rank):
            raise ValueError("the checkpoint's adapter has other layers or another rank than this model's")
        for path, pair in tensors.items():
            for parameter, value in zip(self.factors[path], pair, strict=True):
                parameter.data.copy_(value)

        self.optimizer = torch.optim.AdamW(self.parameters)
        self.optimizer.zero_grad()
        if not optimizer:
            return
        if not (folder / OPTIMIZER).exists():
            raise ValueError("the checkpoint has no optimiser state: it was saved for sampling; load its weights only")
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in load_file(folder / OPTIMIZER).items():
            index, name = key.split(".")
            state.setdefault(int(index), {})[name] = value
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})


def read_factors(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the factors A and B of each layer, by its path, of a folder that `Adapter.save` wrote."""
    factors = read_adapters(load_file(folder / WEIGHTS).items())
    paths = [name.removesuffix(".lora_A.weight") for name in factors if name.endswith(".lora_A.weight")]
    return {path: (factors[f"{path}.lora_A.weight"], factors[f"{path}.lora_B.weight"]) for path in paths}


def scale_factors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the factors of a file of `Adapter.save` as `forge.models.weight_layouts.merge_adapters` takes them."""
    factors = read_adapters(tensors.items())
    return {
        name: factor * (ALPHA / factor.shape[1]) if name.endswith("B.weight") else factor
        for name, factor in factors.items()
    }
