"""Faults of engine, trainer and weights that `forge mismatch` has to name, and clean runs that it must not accuse.

Each case is a run of a few steps with a tiny model, by the library's own engine and trainer in this process: a folder
with recorded rollouts and checkpoints as a run leaves it. A fault is put into the engine, the trainer, the weights or
the recorded rollouts from outside; the comparison sees the folder alone, and the process as it is.

    python -m benchmarks.mismatch               # all cases, with what was said
    python -m benchmarks.mismatch stale_shard   # one of them
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from transformers.utils import logging

from benchmarks.mismatch_faults import FAULTS, LORA, VARIANTS, YARN
from benchmarks.mismatch_runs import CLEAN, Setup, record_run
from forge_inspect.mismatch.verdict import Mismatch, compare

CLEAN_RUNS: dict[str, Setup] = {
    "dense": Setup(),
    "tied": Setup("qwen2", tied=True, seed=1),
    "grouped_queries": Setup("llama", seed=2, sizes={"num_key_value_heads": 1}),
    "sliding_window": Setup("mistral", seed=3),
    "experts": Setup("qwen3_moe", seed=4),
    "experts_of_olmoe": Setup("olmoe", seed=5),
    "gemma": Setup("gemma3", tied=True, seed=6),
    "adapters": Setup(seed=7, settings=LORA),
    "temperature": Setup(seed=8, settings={"grpo.temperature": 0.7}),
    "top_p": Setup(seed=9, settings={"grpo.top_p": 0.9, "grpo.top_k": 20}),
    "scaled_positions": Setup("llama", seed=10, sizes=YARN),
    "chat_template": Setup(seed=11, chat=True, bos=False),
    "two_updates": Setup(seed=12, settings={"training.mini_batches": 2}),
}


SEEDED = {**FAULTS, **VARIANTS}


def verdict_of(name: str, root: Path) -> Mismatch:
    """Record the run of a case, clean or with its fault, and compare."""
    fault = SEEDED.get(name, CLEAN)
    setup = fault.setup if name in SEEDED else CLEAN_RUNS[name.removeprefix("clean:")]
    with fault.always():
        return compare(record_run(root, setup, fault), bisect=True)


def is_named(name: str, verdict: Mismatch) -> bool:
    """Whether the verdict is the right one: component, cause and layer of a fault, or none."""
    if name not in SEEDED:
        return verdict.is_sound
    fault = SEEDED[name]
    text = " ".join(verdict.faults[:1])
    right_layer = fault.layer is None or verdict.layer == fault.layer
    return fault.component in text and fault.cause in text and right_layer


def main() -> None:
    """Print what is said of each case; exit code 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="cases; all by default")
    logging.disable_progress_bar()
    names = parser.parse_args().names or [*SEEDED, *(f"clean:{name}" for name in CLEAN_RUNS)]
    wrong = []
    for name in names:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as root:
            verdict = verdict_of(name, Path(root))
        right = is_named(name, verdict)
        wrong += [] if right else [name]
        print(
            f"{'ok   ' if right else 'WRONG'} {name} ({time.perf_counter() - began:.1f} s): {verdict.sentence}",
            flush=True,
        )
        if not right:
            for link in verdict.links:
                print(
                    f"      {link.first} | {link.second}: {link.worst:.2g} of {link.tolerance:.2g}, share {link.share}"
                )
            print("      ", verdict.faults[1:], verdict.notes, verdict.part, verdict.layer)
    print(f"{len(names) - len(wrong)} of {len(names)} are right")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
