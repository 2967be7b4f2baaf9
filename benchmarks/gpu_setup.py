"""What the parts of `gpu.py` share: a row of the table with its limit, the models, the device."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from forge.models.tokenizer import PRINTABLE, character_tokenizer
from forge.training.distributed import Ranks, join_ranks
from forge.training.settings import OptimizerSettings
from forge.training.trainer import PolicyTrainer
from forge.types import Completion, Sampling

SIZES: dict[str, dict[str, int]] = {
    # Qwen3-0.6B's shape. Its cache has as many bytes a token as that of Qwen3-1.7B.
    "0.6b": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}
# Dense bfloat16 operations a second, from the makers' data sheets.
PEAK = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12, "MI300X": 1307e12}


class Row(NamedTuple):
    """A line of the table. `limit` is what the figure had to keep to; empty: there is none."""

    what: str
    figure: str
    limit: str = ""
    passed: bool = True

    @classmethod
    def at_most(cls, what: str, value: float, most: float, form: str = ".1e", unit: str = "") -> Row:
        """A number that must not exceed `most`."""
        return cls(what, f"{value:{form}}{unit}", f"at most {most:{form}}{unit}", value <= most)


@dataclass(frozen=True, slots=True)
class Setup:
    """Of one run of the script.

    folder: what the parts may write to. `model` in it is the model of `size`.
    quick: few tokens and steps, for a CPU.
    """

    size: str
    quick: bool
    folder: Path

    @property
    def model(self) -> Path:
        """The model's folder."""
        return self.folder / "model"

    @property
    def shape(self) -> dict[str, int]:
        """The model's sizes, by their names in its configuration."""
        return SIZES[self.size]

    @property
    def device(self) -> torch.device:
        """The GPU, or the CPU where there is none."""
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU."""
        return self.device.type != "cpu"

    @property
    def dtype(self) -> str:
        """What engines and trainers compute in."""
        return "bfloat16" if self.on_gpu else "float32"

    @property
    def engines(self) -> list[str]:
        """The installed engines."""
        return ["embedded", *(["vllm"] if importlib.util.find_spec("vllm") else [])]


def engine_cases(setup: Setup) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each engine by a name, with its settings; the embedded one on a GPU also with captured steps."""
    for name in setup.engines:
        yield name, name, {}
        if name == "embedded" and setup.on_gpu:
            yield f"{name} with cuda_graphs", name, {"cuda_graphs": True}


@lru_cache
def ranks(dtype: str) -> Ranks:
    """The one rank of this process, as an actor of a trainer has it."""
    return join_ranks(mesh=dtype == "bfloat16")


def trainer(model: Path, dtype: str, seq_len: int = 8192, **settings: Any) -> PolicyTrainer:
    """A trainer of the model in a folder."""
    return PolicyTrainer(model, ranks(dtype), OptimizerSettings(), seq_len=seq_len, dtype=dtype, **settings)


def build(folder: Path, config: Any, kind: Any = Qwen3ForCausalLM, dtype: torch.dtype = torch.float32) -> int:
    """Write a model with random weights and some tokenizer; its number of parameters."""
    torch.manual_seed(0)
    config.eos_token_id = config.bos_token_id = None
    with torch.device(torch.accelerator.current_accelerator(check_available=True) or "cpu"):
        model = kind(config).to(dtype)
    model.save_pretrained(folder)
    character_tokenizer(PRINTABLE).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def build_model(setup: Setup) -> int:
    """Write the model of the run, in bfloat16 as published models are."""
    config = Qwen3Config(**setup.shape, max_position_embeddings=131_072, tie_word_embeddings=True)
    return build(setup.model, config, dtype=torch.bfloat16)


def prompts(count: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Random token ids, [count][length]."""
    return np.random.default_rng(seed).integers(5, vocab, (count, length)).tolist()


def generated(engine: Any, contexts: Sequence[Sequence[int]], tokens: int) -> list[Completion]:
    """One completion of each context, all submitted at once."""
    futures = [engine.submit(prompt, Sampling(max_tokens=tokens, seed=i)) for i, prompt in enumerate(contexts)]
    return [future.result(timeout=600)[0] for future in futures]


def synchronize(setup: Setup) -> None:
    """Wait until the device has done what it was given."""
    if setup.on_gpu:
        torch.accelerator.synchronize()
