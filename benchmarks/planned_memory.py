"""The planned peak of a trainer's rank against the measured one, on a CPU, for models and settings of every kind.

    python benchmarks/planned_memory.py

Measured: the most bytes that torch's CPU allocator holds in the second update, with weights and state, by its profiler.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from forge.training.build import Backend
from forge.training.distributed import join_ranks, leave_ranks
from forge.training.policy import Head
from forge.training.settings import LoraSettings, OptimizerSettings, Parallelism, PassSettings
from forge.training.trainer import PolicyTrainer
from forge_inspect.plan.components import full_batch, weighted_scores, weighted_values
from forge_inspect.plan.passes import run_passes, trainer_memory

SEQ_LEN = 1024
SIZES = {
    "vocab_size": 2048,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 24,
    "max_position_embeddings": 4096,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}


@dataclass(frozen=True)
class Case:
    """One trainer: a family of models, its settings, and how its ranks divide the work."""

    family: str = "Qwen3"
    ranks: int = 1
    updates: int = 1  # micro-batches of each rank
    head: Head = "policy"
    length: int = 256
    lora: int | None = None
    passes: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, int] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    backend: Backend = "fsdp"

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items() if value != asdict(Case())[name])

    @property
    def data_ranks(self) -> int:
        """Ranks that have different sequences."""
        layout = Parallelism(**self.layout).over(self.ranks)
        return self.ranks // (layout.tensor_parallel_degree * layout.context_parallel_degree)


RECOMPUTED = {"gradient_checkpointing": True}
TENSOR = {"tensor_parallel_degree": 2}
CONTEXT = {"context_parallel_degree": 2}
EXPERT = {"expert_parallel_degree": 2}
CASES = [
    *(Case(family) for family in ("Qwen3", "Qwen2", "Llama", "Mistral", "Gemma3Text", "Qwen3Moe")),
    *(Case(family, passes=RECOMPUTED, updates=2) for family in ("Qwen3", "Llama", "Gemma3Text", "Qwen3Moe")),
    *(Case(updates=2, length=length) for length in (64, 512, 1024)),
    *(Case(optimizer=settings) for settings in ({"optimizer_dtype": "bfloat16"},)),
    *(Case(family, lora=8, updates=2) for family in ("Qwen3", "Llama", "Qwen3Moe")),
    Case(lora=8, passes=RECOMPUTED),
    *(Case(head=head) for head in ("value", "reward")),
    Case(head="value", passes=RECOMPUTED, updates=2),
    Case(shape={"vocab_size": 32000}),
    Case(shape={"vocab_size": 32000, "tie_word_embeddings": True}, passes=RECOMPUTED),
    Case(shape={"num_hidden_layers": 12}, passes=RECOMPUTED),
    *(Case(family, ranks=2) for family in ("Qwen3", "Llama", "Qwen3Moe", "Gemma3Text")),
    *(Case(ranks=ranks, passes=RECOMPUTED, updates=2) for ranks in (2, 4)),
    Case(ranks=4, updates=2),
    Case(ranks=2, lora=8, updates=2),
    Case(ranks=2, head="value"),
    Case(ranks=2, shape={"vocab_size": 32000}, passes=RECOMPUTED),
    *(Case(ranks=2, layout=layout, updates=2) for layout in (TENSOR, CONTEXT)),
    *(Case(ranks=4, layout=layout) for layout in (TENSOR, CONTEXT)),
    Case(ranks=4, layout={**TENSOR, **CONTEXT}, passes=RECOMPUTED),
    Case(ranks=4, layout={"data_parallel_replicate_degree": 2}),
    Case(ranks=2, layout=TENSOR, passes=RECOMPUTED),
    Case("Llama", ranks=2, layout=CONTEXT, lora=8),
]
# Mixtures of TorchTitan, which is an extra.
TITAN = [
    Case("Qwen3Moe", backend="titan"),
    Case("Qwen3Moe", ranks=2, backend="titan"),
    Case("Qwen3Moe", ranks=2, backend="titan", layout=EXPERT),
    Case("Qwen3Moe", ranks=2, backend="titan", layout=EXPERT, updates=2),
    Case("Qwen3Moe", ranks=2, backend="titan", layout=EXPERT, passes=RECOMPUTED, updates=2),
    Case("Qwen3Moe", ranks=2, backend="titan", layout={**EXPERT, **CONTEXT}),
    Case("Qwen3Moe", ranks=4, backend="titan", layout=EXPERT, updates=2),
    Case("Qwen3Moe", ranks=4, backend="titan", layout={"expert_parallel_degree": 4}, passes=RECOMPUTED, updates=2),
    Case("Qwen3Moe", ranks=4, backend="titan", layout={**EXPERT, "data_parallel_replicate_degree": 2}),
]


def write_model(case: Case, folder: Path) -> Path:
    """A model of random weights in a folder."""
    kind = getattr(transformers, f"{case.family}Config")
    experts = EXPERTS if case.family.endswith("Moe") else {}
    sliding = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 96}
    windows = sliding if case.family == "Gemma3Text" else {}
    torch.manual_seed(0)
    config = kind(**{**SIZES, **experts, **windows, **case.shape})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def measured_peak(work: Callable[[], object]) -> int:
    """The most bytes that torch's CPU allocator holds alongside what exists before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = 0
    most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def train(case: Case, model: str, store: str, rank: int, answers: Any) -> None:
    """Train two updates on one of the ranks; the first of them answers with its peak."""
    if case.ranks > 1:
        torch.set_num_threads(1)
    meeting = dist.FileStore(store, case.ranks) if case.ranks > 1 else None
    ranks = join_ranks(rank, case.ranks, meeting, Parallelism(**case.layout))
    lora = None if case.lora is None else LoraSettings(rank=case.lora)
    settings = {"seq_len": SEQ_LEN, "backend": case.backend, **case.passes}
    trainer = PolicyTrainer(model, ranks, OptimizerSettings(**case.optimizer), head=case.head, lora=lora, **settings)
    batch = full_batch(SEQ_LEN * case.updates, case.length, case.data_ranks)
    loss = weighted_scores if case.head == "policy" else weighted_values
    trainer.train_step(batch, loss)
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    tensors = [*trainer.policy.parameters(), *states]
    held = sum(_local(tensor).nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
    peak = measured_peak(lambda: trainer.train_step(batch, loss))
    if rank == 0:
        answers.put(held + peak)
    leave_ranks()


def measure(case: Case, model: Path, scratch: Path) -> int:
    """The measured peak of the first rank, in bytes."""
    if case.ranks == 1:
        answer: SimpleQueue[int] = SimpleQueue()
        train(case, str(model), "", 0, answer)
        return answer.get()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    store = str(scratch / "store")
    processes = [
        context.Process(target=train, args=(case, str(model), store, rank, answers)) for rank in range(case.ranks)
    ]
    for process in processes:
        process.start()
    try:
        return int(answers.get(timeout=300))
    finally:
        for process in processes:
            process.join(60)


def plan(case: Case, model: Path) -> int:
    """The planned one."""
    layout = Parallelism(**case.layout).over(case.ranks)
    settings = PassSettings(seq_len=SEQ_LEN, **case.passes)
    passes = run_passes(
        model,
        full_batch(SEQ_LEN, case.length, case.data_ranks),
        weighted_scores if case.head == "policy" else weighted_values,
        settings,
        head=case.head,
        lora=None if case.lora is None else LoraSettings(rank=case.lora),
        parallelism=layout,
        world_size=case.ranks,
        backend=case.backend,
    )
    shards = layout.data_parallel_shard_degree * layout.context_parallel_degree
    memory = trainer_memory(
        passes,
        settings,
        OptimizerSettings(**case.optimizer),
        shards=None if case.ranks == 1 else shards,
        micro_batches=case.updates,
        gloo=True,
    )
    return memory.total


def compare_cases() -> None:
    """Print each case, and the errors of all."""
    errors = []
    cases = [*CASES, *TITAN] if importlib.util.find_spec("torchtitan") else CASES
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            model = write_model(case, Path(folder) / "model")
            measured = measure(case, model, Path(folder))
            planned = plan(case, model)
        errors.append(planned / measured - 1)
        print(
            f"{planned / 1e6:8.1f} MB planned, {measured / 1e6:8.1f} measured, {errors[-1]:+7.2%}  {case}", flush=True
        )
    sizes = [abs(error) for error in errors]
    print(f"{len(sizes)} cases: median error {statistics.median(sizes):.2%}, worst {max(sizes):.2%}")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def main() -> None:
    """Compare the cases."""
    torch.set_num_threads(1)
    compare_cases()


if __name__ == "__main__":
    main()
