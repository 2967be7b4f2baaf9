"""The trip of one prompt in one process, from its file to new weights in the engine: which files and functions of this
library it meets, stage by stage.

    python scripts/trace_prompt.py              # the numbers
    python scripts/trace_prompt.py --functions  # also the names
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

from forge.algorithms import load_algorithm
from forge.data.load import load_data
from forge.engines import load_engine
from forge.models import build_small_model, open_tokenizer
from forge.rewards.reward import Reward
from forge.rewards.rules import ExactMatch
from forge.runtime.store import VersionStore
from forge.training import credit
from forge.training.distributed import join_ranks
from forge.training.settings import OptimizerSettings
from forge.training.trainer import PolicyTrainer
from forge.types import Episode, Group, Sampling

SOURCE = str(Path(__file__).parents[1] / "src" / "forge") + "/"


class Recorder:
    """The functions of this library that are called, by stage, in all threads that start while it is installed."""

    def __init__(self) -> None:
        self.stages: dict[str, set[CodeType]] = {}
        self._calls: set[CodeType] = set()

    def _record(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE) and not code.co_name.startswith("<"):
            self._calls.add(code)

    def __enter__(self) -> Self:
        threading.setprofile(self._record)
        sys.setprofile(self._record)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record what is called within the block."""
        self._calls = self.stages[name] = set()
        try:
            yield
        finally:
            self._calls = set()


def files(calls: set[CodeType]) -> set[str]:
    """The files of functions, below src/forge."""
    return {call.co_filename.removeprefix(SOURCE) for call in calls}


def trip(folder: Path, recorder: Recorder) -> None:
    """One prompt and its eight samples, trained by DAPO."""
    rows = [{"question": f"{number} + 1 = ", "answer": str(number + 1)} for number in range(8)]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = build_small_model(
        folder / "model", seed=0, alphabet=None, hidden_size=32, layers=2, heads=2, kv_heads=1, max_positions=64
    )
    tokenizer = open_tokenizer(model)
    algorithm = load_algorithm("dapo")
    store = VersionStore.create()
    engine = load_engine("embedded", model, slots=8)
    trainer = PolicyTrainer(model, join_ranks(), OptimizerSettings(), seq_len=64)
    reward = Reward([ExactMatch()], ExactMatch())
    reward.setup()
    scores = {"a": 0.0, "b": 1.0}
    try:
        with recorder.stage("data"):
            stream = load_data(tokenizer, kind="prompts", path=str(data))
            sample = next(stream)
        with recorder.stage("generate"):
            sampling = Sampling(n=8, max_tokens=8, seed=1)
            completions = engine.submit(sample.prompt.token_ids, sampling).result()
        with recorder.stage("reward"):
            texts = tokenizer.batch_decode([completion.token_ids for completion in completions])
            asyncio.run(reward.score(sample.prompt.text, texts, sample.target))
        episodes = [Episode(completion, scores["ab"[index % 2]]) for index, completion in enumerate(completions)]
        group = Group(episodes, sample.prompt.index, sample.target, sample.prompt.text)
        with recorder.stage("credit and packing"):
            batch = credit.make_batch([group], algorithm, 0, [], aggregation="token_mean", horizon=None)
            credit.assign_credit(batch, algorithm)
        with recorder.stage("train"):
            trainer.train_step(batch, algorithm)
        with recorder.stage("publish"):
            store.put("policy", trainer.weights(), 1)
        with recorder.stage("update"), store.open("policy", 1) as snapshot:
            engine.update_weights(snapshot.tensors(), 1, snapshot.digest).result()
    finally:
        engine.close()
        store.close()


def name_of(call: CodeType) -> str:
    """A function as `file:qualified name`."""
    return f"{call.co_filename.removeprefix(SOURCE)}:{call.co_qualname}"


def main() -> None:
    """Print a line for each stage and for all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", action="store_true", help="print the functions of each stage")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Recorder() as recorder:
        trip(Path(folder), recorder)
    total: set[CodeType] = set()
    for stage, calls in recorder.stages.items():
        total |= calls
        print(f"{stage:20} {len(files(calls)):3} files {len(calls):4} functions")
        if options.functions:
            print(*sorted(map(name_of, calls)), sep="\n")
    print(f"{'one prompt':20} {len(files(total)):3} files {len(total):4} functions")


if __name__ == "__main__":
    main()
