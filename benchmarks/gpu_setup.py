"""What the parts of `gpu.py` share: a row of the table with its limit, the models, the device."""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from forge.models.tokenizer import PRINTABLE, character_tokenizer
from forge.training.distributed import Ranks, join_ranks
from forge.training.settings import OptimizerSettings, Parallelism
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
    trl: the interpreter of an environment with TRL.
    """

    size: str
    folder: Path
    trl: str = sys.executable

    @property
    def quick(self) -> bool:
        """Whether few tokens and steps are enough, for a CPU."""
        return self.size == "tiny"

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
        """Whether there is a GPU, the emulated one included."""
        return self.device.type != "cpu"

    @property
    def real(self) -> bool:
        """Whether the GPU has kernels and memory of its own, and other processes see it."""
        return self.device.type not in ("cpu", "emulated")

    @property
    def dtype(self) -> str:
        """What engines and trainers compute in."""
        return "bfloat16" if self.on_gpu else "float32"

    @property
    def engines(self) -> list[str]:
        """The installed engines that can compute on the device."""
        usable = importlib.util.find_spec("vllm") and (self.real or not self.on_gpu)
        return ["embedded", *(["vllm"] if usable else [])]


def engine_cases(setup: Setup) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each engine by a name, with its settings; the embedded one on a GPU also with captured steps."""
    for name in setup.engines:
        # What this process holds of the GPU's memory, vLLM's would count as missing.
        yield name, name, {"vllm": {"gpu_memory_utilization": 0.5}} if name == "vllm" and setup.real else {}
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
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
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
    if setup.real:
        torch.accelerator.synchronize()


def forget_memory(setup: Setup) -> None:
    """Free unused memory, and reset the peak of memory."""
    gc.collect()  # FSDP's hooks and its modules refer to each other
    if setup.real:
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()


def most_memory(setup: Setup) -> str:
    """The most memory since `forget_memory`, to follow other figures; empty without a real GPU."""
    return f", {torch.accelerator.max_memory_allocated() / 2**30:.2f} GiB" if setup.real else ""


def on_ranks(
    act: Callable[[Ranks, Setup], dict[str, Any]], setup: Setup, layout: Parallelism, size: int = 2
) -> list[dict[str, Any]]:
    """What each rank of a layout found, or how it ended. They are forked before this process opens a device."""
    folder = Path(tempfile.mkdtemp(dir=setup.folder))

    def run_rank(rank: int) -> None:
        store = dist.FileStore(str(folder / "store"), size)
        ranks = join_ranks(rank, size, store, layout, mesh=setup.on_gpu)
        (folder / str(rank)).write_text(json.dumps(act(ranks, setup)))
        if size > 1:
            dist.barrier()

    started = [get_context("fork").Process(target=run_rank, args=(rank,)) for rank in range(size)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    found = [folder / str(rank) for rank in range(size)]
    return [
        json.loads(path.read_text()) if path.exists() else {"ended": process.exitcode}
        for path, process in zip(found, started, strict=True)
    ]


def device_name(setup: Setup) -> str:
    """The device's name, as its maker calls it."""
    return torch.get_device_module(setup.device).get_device_name() if setup.real else setup.device.type.upper()
