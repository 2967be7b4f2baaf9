"""Two GPUs in five minutes: what NCCL and a second device change, as rows like those of `gpu.py`.

    python benchmarks/two_gpus.py --output build/two_gpus.jsonl   # a model of Qwen3-0.6B's shape, random weights
    python benchmarks/two_gpus.py --size tiny                     # two gloo ranks on a CPU, figures without meaning
    python benchmarks/two_gpus.py --dry-run                       # the same on two emulated devices

Options, output and a second call are those of `gpu.py`. docs/benchmarks.md says of each call where it is exercised
without NCCL, and what only this script can show.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import gpu
import numpy as np
import torch
import torch.distributed as dist
from gpu_exact import compare, reference
from gpu_runs import time_grpo
from gpu_setup import Row, Setup, device_name, most_memory, on_ranks, synchronize
from gpu_speed import repeated, rows_of
from transformers import AutoModelForCausalLM

from forge.engines import load_engine
from forge.losses import GRPOLoss
from forge.runtime.store import VersionStore
from forge.training import distributed
from forge.training.distributed import Ranks
from forge.training.settings import OptimizerSettings, Parallelism
from forge.training.trainer import PolicyTrainer

PATIENCE = 5  # seconds that a rank waits for one that does not come
SHARDS = Parallelism(data_parallel_shard_degree=2)
LAYOUTS = {
    "one rank": Parallelism(),
    "shards": SHARDS,
    "copies": Parallelism(data_parallel_replicate_degree=2),
    "tensor": Parallelism(tensor_parallel_degree=2),
    "context": Parallelism(context_parallel_degree=2),
}


def call_collectives(ranks: Ranks, setup: Setup) -> dict[str, Any]:
    """Each collective of the trainer, with what it must give, and the rate of a large one."""
    device = ranks.device
    mine = torch.full((2,), float(ranks.rank + 1), device=device)
    calls: dict[str, tuple[list[float], Any]] = {
        "all_reduce": ([3, 3], lambda out: dist.all_reduce(out.copy_(mine))),
        "all_reduce MAX": ([2, 2], lambda out: dist.all_reduce(out.copy_(mine), dist.ReduceOp.MAX)),
        # What follows `wait` is on another stream than NCCL's.
        "async all_reduce": ([3, 3], lambda out: dist.all_reduce(out.copy_(mine), async_op=True).wait()),
        "all_gather": ([1, 1, 2, 2], lambda out: dist.all_gather_single(out, mine)),
        "reduce_scatter": ([3], lambda out: dist.reduce_scatter_single(out, mine)),
        "all_to_all": ([1, 2], lambda out: dist.all_to_all_single(out, mine)),
        "broadcast": ([2, 2], lambda out: dist.broadcast(out.copy_(mine), src=1)),
    }
    wrong = []
    for name, (expected, call) in calls.items():
        out = torch.zeros(len(expected), device=device)
        call(out)
        wrong += [name] * ((2 * out).tolist() != [2 * number for number in expected])

    # A checkpoint's thread, over gloo, while the trainer's ranks exchange objects.
    group, gathered, named = dist.new_group(backend="gloo"), [None, None], [None, None]
    thread = threading.Thread(target=dist.all_gather_object, args=(gathered, ranks.rank, group))
    thread.start()
    dist.all_gather_object(named, device.type)
    dist.barrier()
    thread.join()
    wrong += ["objects"] * (gathered != [0, 1] or named != [device.type] * 2)

    block = torch.ones(2**26 if setup.real else 2**16, device=device)
    rate = block.nbytes / repeated(lambda: dist.all_reduce(block), setup) / 1e9
    where = f"{device}, {device_name(setup)}, {dist.get_backend()}"
    if device.type == "cuda":
        where += f" {torch.cuda.nccl.version()}, peers {torch.cuda.can_device_access_peer(0, 1)}"
    return {"where": where, "wrong": ", ".join(wrong), "rate": f"{rate:.2f} GB/s"}


def collectives(setup: Setup) -> Iterator[Row]:
    """Both ranks' devices, wrong collectives, and the rate of an all-reduce."""
    for rank, found in enumerate(on_ranks(call_collectives, setup, SHARDS)):
        yield Row(f"rank {rank}, all_reduce of 256 MiB", f"{found['where']}, {found['rate']}")
        yield Row(f"rank {rank}: wrong collectives", found["wrong"] or "none", "none", not found["wrong"])


def train(ranks: Ranks, setup: Setup, store: VersionStore | None = None) -> dict[str, Any]:
    """Three steps of the same batches in any layout; the weights are put into a store, if there is one."""
    length, count = (64, 4) if setup.quick else (2048, 16)
    policy = PolicyTrainer(setup.model, ranks, OptimizerSettings(), seq_len=4 * length, dtype=setup.dtype)
    norms, starts = list[float](), list[float]()
    for seed in range(3):
        batch = rows_of(length, count, setup.shape["vocab_size"], seed)
        synchronize(setup)
        starts.append(time.perf_counter())
        norms.append(policy.train_step(batch, GRPOLoss())["grad_norm"])
    synchronize(setup)
    rate = len(batch.tokens) / (time.perf_counter() - starts[-1])
    if store is not None:
        store.put("policy", policy.weights(), 1, dtype=getattr(torch, setup.dtype))
    logprobs = policy.logprobs(rows_of(64, 4, setup.shape["vocab_size"])).tolist()
    # The process that forks the ranks must not ask for a device itself.
    apart = 2e-2 if setup.on_gpu else 1e-4
    return {"norms": norms, "figure": f"{rate:,.0f}{most_memory(setup)}", "logprobs": logprobs, "apart": apart}


def layouts(setup: Setup) -> Iterator[Row]:
    """Each layout of two ranks against one: tokens a second, memory of a rank, norms of gradients."""
    expected = np.zeros(3)
    for name, layout in LAYOUTS.items():
        found = on_ranks(train, setup, layout, 1 if name == "one rank" else 2)
        norms = np.array([one["norms"] for one in found])
        expected = norms[0] if name == "one rank" else expected
        yield Row(f"{name}: tokens/s", found[0]["figure"])
        apart = float(np.abs(norms / expected - 1).max())
        yield Row.at_most(f"{name}: norms from one rank's, relative", apart, found[0]["apart"])


def weights(setup: Setup) -> Iterator[Row]:
    """Two ranks' weights in engines, of which vLLM's is divided over both devices; all against transformers."""
    store = VersionStore.create()
    try:
        found = on_ranks(partial(train, store=store), setup, SHARDS)[0]
        with store.open("policy", 1) as snapshot:
            exact, rounded = (
                AutoModelForCausalLM.from_pretrained(setup.model, dtype=dtype).to(setup.device)
                for dtype in (torch.float32, getattr(torch, setup.dtype))
            )
            for model in (exact, rounded):
                model.load_state_dict(dict(snapshot.tensors()), strict=False)
            batch = rows_of(64, 4, setup.shape["vocab_size"])
            apart = np.abs(reference(exact, batch) - np.array(found["logprobs"])[batch.mask]).mean()
            yield Row.at_most("two ranks: trainer from transformers, mean", apart, 5e-2 if setup.on_gpu else 1e-4)
            for kind in setup.engines:
                both = {"tensor_parallel_size": 2, **({"gpu_memory_utilization": 0.5} if setup.real else {})}
                options: Any = {"vllm": both} if kind == "vllm" else {}
                engine = load_engine(kind, setup.model, slots=8, max_seq_len=256, dtype=setup.dtype, **options)
                try:
                    start = time.perf_counter()
                    engine.update_weights(snapshot.tensors(), 1, snapshot.digest).result(timeout=600)
                    yield Row(f"two ranks: weights taken over by {kind}", f"{time.perf_counter() - start:.2f} s")
                    yield from compare(f"two ranks: {kind}", engine, setup, exact, rounded)
                finally:
                    engine.close()
    finally:
        store.close()


def lose_peer(ranks: Ranks, setup: Setup) -> dict[str, Any]:
    """Rank 0 waits in a collective for rank 1, which stays away."""
    block = torch.ones(8, device=ranks.device)
    dist.all_reduce(block)
    if ranks.rank:
        time.sleep(4 * PATIENCE)
        os._exit(0)
    start = time.monotonic()
    try:
        dist.all_reduce(block)
        synchronize(setup)
    except RuntimeError as error:
        return {"raised": type(error).__name__, "seconds": round(time.monotonic() - start, 1)}
    return {"returned": block.tolist()}


def timeouts(setup: Setup) -> Iterator[Row]:
    """How a rank ends whose peer does not come, and when: NCCL's watchdog may end the process."""
    distributed.COLLECTIVE_TIMEOUT = timedelta(seconds=PATIENCE)
    found = on_ranks(lose_peer, setup, SHARDS)[0]
    yield Row(f"rank 0 waits {PATIENCE} s for rank 1", json.dumps(found), "raises or ends", "returned" not in found)


APART = {"colocated": "false", "async.max_policy_age": 1}
BOTH = {"services.trainer.procs": 2, "services.generator.num_replicas": 2}
PARTS = {
    "collectives": gpu.Part(collectives, 30),
    "layouts": gpu.Part(layouts, 100),
    "weights": gpu.Part(weights, 60),
    "apart": gpu.Part(partial(time_grpo, "trainer and generator on a device each", APART), 60, emulated=False),
    "both": gpu.Part(partial(time_grpo, "two trainers and generators in turn", BOTH), 60, emulated=False),
    "timeouts": gpu.Part(timeouts, 30),
}

if __name__ == "__main__":
    gpu.main(__doc__, PARTS, minutes=5)
