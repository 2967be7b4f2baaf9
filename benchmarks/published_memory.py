"""Published peaks of other trainers beside the plan of this one: prime-rl's baselines, and TorchTitan's Llama rows.

`benchmarks/planned_memory.py --rows TABLE` prints them. Nothing is fitted to them.
"""

from __future__ import annotations

import csv
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forge.training.settings import LoraSettings, OptimizerSettings, Parallelism, PassSettings
from forge_inspect.plan.memory import trainer_memory
from forge_inspect.plan.passes import run_passes
from forge_inspect.plan.shapes import PUBLIC, shape_folder
from forge_inspect.plan.trainers import full_batch, weighted_scores

GIB = 2**30
TITAN_MODELS = {
    "Llama 3 8B": "meta-llama/Llama-3.1-8B",  # of the same sizes
    "Llama 3.1 8B": "meta-llama/Llama-3.1-8B",
    "Llama 3.1 70B": "meta-llama/Llama-3.1-70B-Instruct",
}
SEQ_LEN = 8192  # of TorchTitan's tables, where a row does not state another
# Bytes of one logit at the peak of torch's cross-entropy: in bfloat16, and in float32 its log-softmax, the gradient of
# that and the gradient of the logits. This library's head holds a chunk of them at a time.
LOGIT = 2 + 4 + 4 + 4

Row = dict[str, str]


def compare_rows(path: Path) -> None:
    """Print the plan of each published row of this library's families beside its peak."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines, delimiter="\t"))
    plans = titan_rows(rows) if "layout" in rows[0] else primerl_rows(rows)
    for plan in plans:
        print(plan if isinstance(plan, str) else json.dumps(plan), flush=True)


def primerl_rows(rows: list[Row]) -> Iterator[dict[str, Any] | str]:
    """Each of prime-rl's rows beside its plan, or why there is none."""
    for row in rows:
        if row["model"] not in PUBLIC:
            yield f"{row['model']}: its shape is not known here"
            continue
        gpus = int(row["gpus"])
        planned = peak(
            row["model"],
            gpus,
            Parallelism(),
            length=int(row["seq_len"]),
            lora=int(row["lora_rank"]) if row["lora_rank"] else None,
            micro_batches=int(row["micro_batches"]),
        )
        published = float(row["peak_gib"])
        names = ("model", "type", "lora_rank", "seq_len", "gpus", "device", "ac")
        plan: dict[str, Any] = {name: row[name] for name in names}
        plan |= {"published": published, "planned": round(planned, 2)}
        plan["ratio"] = round(planned / published, 3) if published else None
        if row["type"] == "sft":
            plan["logits"] = logits(row["model"], int(row["seq_len"]))
        yield plan


def titan_rows(rows: list[Row]) -> Iterator[dict[str, Any] | str]:
    """Each of TorchTitan's rows beside its plan: with recomputed activations, and where the row recomputes some of
    them (selective) also with all kept; and what whole logits would add."""
    stated: dict[str, str] = {}
    source = ""
    for row in rows:
        source = source if row["source"] == "same" else row["source"]
        if not source.startswith("torchtitan"):
            continue
        # A row states what differs from the one before.
        stated = settings_of(row, stated)
        label = f"{row['model']}, {row['gpus']} GPUs, {row['layout']}, {row['setting']}"
        if row["model"] not in TITAN_MODELS or "PP" in row["layout"]:
            yield f"{label}: pipelines are not supported"
            continue
        layout = Parallelism(context_parallel_degree=int(stated["CP"]), tensor_parallel_degree=int(stated["TP"]))
        length = int(stated["seq"])
        sizes = (TITAN_MODELS[row["model"]], int(row["gpus"]), layout)
        published = float(row["peak_gib"])
        planned = peak(*sizes, length=length, batch=int(stated["batch"]))
        result: dict[str, Any] = {"row": label, "published": published, "recomputed": round(planned, 1)}
        if stated["AC"] == "selective":
            result["kept"] = round(peak(*sizes, length=length, batch=int(stated["batch"]), recomputes=False), 1)
        tokens = length * int(stated["batch"]) / (layout.context_parallel_degree * layout.tensor_parallel_degree)
        result["logits"] = logits(sizes[0], tokens)
        yield result


def logits(model: str, tokens: float) -> float:
    """GiB that a cross-entropy over whole logits holds at its peak, for the tokens of a rank."""
    return round(tokens * PUBLIC[model]["vocab_size"] * LOGIT / GIB, 1)


def settings_of(row: Row, before: dict[str, str]) -> dict[str, str]:
    """The numbers of a row's layout and setting, those of the row before where it says "same" or nothing."""
    settings = {"seq": str(SEQ_LEN), "batch": "1", "AC": "selective"} | before
    settings |= {"TP": "1", "CP": "1"} | dict(re.findall(r"\b(TP|CP)(\d+)", row["layout"]))
    settings |= dict(re.findall(r"\b(seq|batch) (\d+)", row["setting"]))
    if kind := re.search(r"\b(selective|full) AC", row["setting"]):
        settings["AC"] = kind[1]
    if "batch" in row["setting"] and "seq" not in row["setting"]:
        settings["seq"] = str(SEQ_LEN)
    return settings


def peak(
    model: str,
    gpus: int,
    layout: Parallelism,
    *,
    length: int,
    batch: int = 1,
    lora: int | None = None,
    micro_batches: int = 1,
    recomputes: bool = True,
) -> float:
    """The planned peak of a rank in GiB, in bfloat16 over float32 weights.

    Args:
        length: tokens of each sequence.
        batch: sequences of a micro-batch, for each rank that has different ones.
        lora: rank of adapters; None trains all weights.
        recomputes: activations are recomputed in the backward pass.
    """
    layout = layout.over(gpus)
    settings = PassSettings(seq_len=length * batch, dtype="bfloat16", gradient_checkpointing=recomputes)
    data_ranks = gpus // (layout.tensor_parallel_degree * layout.context_parallel_degree)
    with tempfile.TemporaryDirectory() as folder:
        passes = run_passes(
            shape_folder(model, Path(folder)),
            full_batch(length * batch, length, data_ranks),
            weighted_scores,
            settings,
            lora=LoraSettings(rank=lora) if lora else None,
            parallelism=layout,
            world_size=gpus,
            device_type="cuda",
        )
    shards = layout.data_parallel_shard_degree * layout.context_parallel_degree
    memory = trainer_memory(
        passes,
        settings,
        OptimizerSettings(),
        shards=shards,
        tensor=layout.tensor_parallel_degree,
        micro_batches=micro_batches,
    )
    return memory.total / GIB
