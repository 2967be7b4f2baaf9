"""Peak host memory of each rank while a model is loaded, published and exported: gloo, CPU, float32.

Usage: python benchmarks/loading.py [layers] [folder]

The model is a random Llama of width 2048; 16 layers are 0.94B parameters. It stays in the folder, if one is given, and
is written only if the folder has none. Each phase has its own peak of the resident
set, interpreter and libraries included, the largest of the ranks. The bound is a rank's shard and the largest tensor,
both in float32, and 500 MB.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.distributed import FileStore
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

from forge.models.tokenizer import PRINTABLE, character_tokenizer
from forge.runtime.store import VersionStore
from forge.training import checkpoint
from forge.training.distributed import join, leave
from forge.training.settings import OptimizerSettings, Parallelism
from forge.training.trainer import PolicyTrainer

WIDTH, VOCABULARY, MARGIN = 2048, 32768, 500
LAYOUTS = {"1": (1, 1), "shard 2": (2, 1), "tensor 2": (1, 2), "shard 4": (4, 1), "shard 2 x tensor 2": (2, 2)}


def write_model(folder: Path, layers: int) -> None:
    """Write the model and a tokenizer."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    with no_init_weights():
        model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.uniform_(-0.02, 0.02)
    model.save_pretrained(folder)
    character_tokenizer(PRINTABLE).save_pretrained(folder)


def measured(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """What `work` returns, the peak of the resident set during it in MB, and seconds."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    start = time.monotonic()
    found = work()
    peak = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert peak is not None
    return found, int(peak[1]) * 1024 / 1e6, time.monotonic() - start


def rank(number: int, shards: int, tensor: int, folder: Path, model: Path, store: VersionStore, results: Any) -> None:
    torch.set_num_threads(1)
    degrees = Parallelism(data_parallel_shard_degree=shards, tensor_parallel_degree=tensor)
    ranks = join(number, shards * tensor, FileStore(str(folder / "rendezvous"), shards * tensor), degrees)
    found: dict[str, tuple[float, float]] = {"before": measured(lambda: None)[1:]}
    trainer, *found["load"] = measured(lambda: PolicyTrainer(model, ranks, OptimizerSettings()))
    _, *found["publish"] = measured(lambda: store.put("policy", trainer.weights(), 1))
    _, *found["export"] = measured(lambda: checkpoint.export(trainer, folder / "model", model))
    leave()
    results.put(found)


def main(layers: int, kept: str | None) -> None:
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as place:
        model = Path(kept or place) / "model"
        if not (model / "tokenizer.json").exists():
            writer = context.Process(target=write_model, args=(model, layers))
            writer.start()
            writer.join()
        parameters = sum(file.stat().st_size for file in model.glob("*.safetensors")) // 4
        print(f"{parameters / 1e9:.2f}B parameters, {parameters * 4 / 1e6:.0f} MB")
        print("| layout | bound | before | load | publish | export | load s | publish s | export s |")
        print("|---|---|---|---|---|---|---|---|---|")
        for name, (shards, tensor) in LAYOUTS.items():
            folder, results, store = Path(tempfile.mkdtemp(dir=place)), context.Queue(), VersionStore.create()
            size = shards * tensor
            common = (shards, tensor, folder, model, store, results)
            processes = [context.Process(target=rank, args=(number, *common)) for number in range(size)]
            for process in processes:
                process.start()
            found = [results.get(timeout=900) for _ in processes]
            for process in processes:
                process.join()
            store.close()
            for file in sorted((folder / "model").glob("*.safetensors")):
                file.unlink()
            most = {phase: [max(each[phase][i] for each in found) for i in (0, 1)] for phase in found[0]}
            bound = (parameters / size + WIDTH * VOCABULARY) * 4 / 1e6 + MARGIN
            cells = [f"{bound:.0f}", *(f"{most[phase][0]:.0f}" for phase in most)]
            cells += [f"{most[phase][1]:.0f}" for phase in ("load", "publish", "export")]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 16, sys.argv[2] if len(sys.argv) > 2 else None)
