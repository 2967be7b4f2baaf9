"""What two and four ranks do in the tests: all scenarios in one process group, which is laid out anew for each."""

import pickle
import traceback
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore

from forge.losses import GSPOLoss
from forge.runtime.store import VersionStore
from forge.training.distributed import Ranks, join_ranks, lay_out, leave_ranks
from forge.training.settings import Parallelism
from tests.training.cases import example, make_trainer, weights_of
from tests.training.ranks import (
    LORA,
    LOSS,
    five_steps,
    of_one_rank,
    plain,
    saved,
    sharded,
)

GSPO = GSPOLoss(0.2, 0.3)
SMALL = {"seq_len": 16, "gradient_accumulation_steps": 3, "gradient_checkpointing": True}

# By name: degrees (copies, shards, context, tensor), the model, settings of `five_steps`.
STEPS: dict[str, tuple[tuple[int, int, int, int], str, dict[str, Any]]] = {
    "tp2": ((1, 1, 1, 2), "qwen2", {}),
    "tp2 checkpointed": ((1, 1, 1, 2), "llama", SMALL),
    "cp2": ((1, 1, 2, 1), "qwen3", {}),
    "tp2 with norms around layers": ((1, 1, 1, 2), "gemma3", {}),
    "tp2 without positions": ((1, 1, 1, 2), "smollm3", {}),
    "cp2 with windows": ((1, 1, 2, 1), "mistral", {}),
    "fsdp2 of fused projections": ((1, 2, 1, 1), "phi3", {"gradient_checkpointing": True}),
    "fsdp2 with norms of projections": ((1, 2, 1, 1), "olmo2", {"lora": LORA, "learning_rate": 1e-2}),
    "cp2 of experts": ((1, 1, 2, 1), "qwen3_moe", {"router_aux_loss": 0.1}),
    "fsdp2 of experts": ((1, 2, 1, 1), "olmoe", {"router_aux_loss": 0.1, "gradient_checkpointing": True}),
    "cp2 of sequences": ((1, 1, 2, 1), "qwen2", {"loss": GSPO}),
    "fsdp2 tp2": ((1, 2, 1, 2), "qwen3", {}),
    "fsdp2 tp2 with biases": ((1, 2, 1, 2), "qwen2", {"loss": GSPO}),
    "hsdp2x2": ((2, 2, 1, 1), "qwen3", {}),
    "hsdp2 tp2": ((2, 1, 1, 2), "llama", {}),
    "cp2 tp2": ((1, 1, 2, 2), "llama", {"gradient_checkpointing": True}),
    "cp2 tp2 of adapters": ((1, 1, 2, 2), "qwen3", {"loss": GSPO, "lora": LORA, "learning_rate": 1e-2}),
    "cp2 fsdp2": ((1, 2, 2, 1), "qwen2", {"loss": GSPO}),
    "cp2 hsdp2": ((2, 1, 2, 1), "llama", {}),
    "cp4": ((1, 1, 4, 1), "qwen3", {}),  # two key heads for four ranks
}


# Those that TorchTitan's dense models have too.
TITAN = [name for name, (_, _, settings) in STEPS.items() if not settings.keys() & {"lora", "router_aux_loss"}]

# Of TorchTitan's mixtures: degrees, ranks that divide the experts between them, settings. The loss of the routers gives
# every expert a gradient: AdamW's first steps make much of rounding where there is none.
EXPERTS: dict[str, tuple[tuple[int, int, int, int], int, dict[str, Any]]] = {
    "ep2": ((1, 2, 1, 1), 2, {"router_aux_loss": 0.1}),
    "ep2 checkpointed": ((1, 2, 1, 1), 2, {"router_aux_loss": 0.1, "gradient_checkpointing": True}),
    "ep2 cp2": ((1, 1, 2, 1), 2, {"router_aux_loss": 0.1}),
    "fsdp2 without ep": ((1, 2, 1, 1), 1, {"router_aux_loss": 0.1}),
    "ep2 fsdp2": ((1, 4, 1, 1), 2, {"router_aux_loss": 0.1}),
    "ep2 hsdp2": ((2, 2, 1, 1), 2, {"router_aux_loss": 0.1}),
    "ep2 fsdp2 cp2": ((1, 2, 2, 1), 2, {"router_aux_loss": 0.1, "loss": GSPO}),
}


def degrees(copies: int, shards: int, context: int, tensor: int, experts: int = 1) -> Parallelism:
    return Parallelism(
        expert_parallel_degree=experts,
        data_parallel_replicate_degree=copies,
        data_parallel_shard_degree=shards,
        tensor_parallel_degree=tensor,
        context_parallel_degree=context,
    )


def world(name: str) -> int:
    return prod((STEPS if name in STEPS else EXPERTS)[name][0])


def stored(ranks: Ranks, model: Path, store: VersionStore) -> dict[str, Any]:
    """Two steps, and the weights as they are put and as they are exported."""
    trainer = make_trainer(model, ranks)
    for seed in range(2):
        trainer.train_step(example(seed), LOSS)
    return {"version": store.put("policy", trainer.weights(), 2), "weights": weights_of(trainer)}


def scenarios(
    at: Callable[[Parallelism], Ranks], size: int, folder: Path, models: dict[str, Path], store: VersionStore
) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {
        name: partial(lambda layout, model, more: five_steps(at(degrees(*layout)), models[model], **more), *case)
        for name, case in STEPS.items()
        if world(name) == size
    }
    if size == 2:
        fsdp, copies = at(degrees(1, 2, 1, 1)), at(degrees(2, 1, 1, 1))
        parts: Any = {"gradient_accumulation_steps": 3, "seq_len": 16}
        hsdp = {
            "hsdp": partial(five_steps, copies, models["qwen3"]),
            "hsdp accumulated": partial(five_steps, copies, models["qwen3"], **parts),
        }
        return sharded(fsdp, folder, models["qwen3"], models["llama"]) | hsdp | found
    square = at(degrees(1, 2, 1, 2))
    both, qwen3 = at(degrees(1, 1, 2, 2)), models["qwen3"]
    return found | {
        "saved": partial(saved, square, qwen3, folder / "saved"),
        "of one rank": partial(of_one_rank, square, qwen3, folder / "one" / "step_000003"),
        "of another layout": partial(of_one_rank, both, qwen3, folder / "saved" / "checkpoints" / "step_000003"),
        "stored": partial(stored, square, qwen3, store),
    }


def of_titan(
    at: Callable[[Parallelism], Ranks], size: int, folder: Path, models: dict[str, Path], _: VersionStore
) -> dict[str, Callable[[], Any]]:
    """The layouts with TorchTitan's models, and a checkpoint with an export of one of them."""
    found: dict[str, Callable[[], Any]] = {}
    for name in TITAN:
        layout, _, settings = STEPS[name]
        for family in ("qwen3", "llama") if world(name) == size else ():
            found[f"{name}, {family}"] = partial(
                lambda layout, model, more: five_steps(at(degrees(*layout)), model, backend="titan", **more),
                *(layout, models[family], settings),
            )
    for name, (layout, experts, settings) in EXPERTS.items():
        if world(name) == size:
            found[f"{name}, qwen3_moe"] = partial(
                lambda layout, more: five_steps(at(layout), models["qwen3_moe"], backend="titan", **more),
                *(degrees(*layout, experts), settings),
            )
    if size == 4:
        mixed = at(degrees(1, 4, 1, 1, 2))
        settings = {"backend": "titan", "router_aux_loss": 0.1}
        found["saved, qwen3_moe"] = partial(saved, mixed, models["qwen3_moe"], folder / "qwen3_moe", **settings)
        for family in ("qwen3", "llama"):
            square = at(degrees(1, 2, 1, 2))
            found[f"saved, {family}"] = partial(saved, square, models[family], folder / family, backend="titan")
    return found


def main(
    rank: int,
    size: int,
    folder: Path,
    models: dict[str, Path],
    weights: VersionStore,
    which: Callable[..., dict[str, Callable[[], Any]]] = scenarios,
) -> None:
    """One of `size` ranks: run every scenario and write down what each returned, or its traceback."""
    torch.set_num_threads(1)
    device = join_ranks(rank, size, FileStore(str(folder / "rendezvous"), size)).device
    outcome: dict[str, Any] = {}
    for name, scenario in which(lambda layout: lay_out(layout, device), size, folder, models, weights).items():
        try:
            outcome[name] = plain(scenario())
        except Exception:
            outcome[name] = traceback.format_exc()
            break  # the others may be waiting in a collective
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(outcome))
    torch.distributed.barrier()
    leave_ranks()
