"""What grows with rows, groups, tokens, steps, runs and replicas takes calls and memory in proportion, or none more."""

import itertools
import sys
import tracemalloc
from functools import partial

import pyarrow as pa
import pytest

from forge.cli import main
from forge.runtime.controller.routers import least_loaded
from forge.training.flex import Runs
from forge_inspect.audit import COLUMNS, _Auditor, _read_batch
from tests.data.rows import make
from tests.observability.test_runs import a_run
from tests.runtime.controller.test_routing import loads, request

# A number whose comparisons are calls.
Counted = type("Counted", (int,), {"__lt__": lambda a, b: int(a) < b, "__gt__": lambda a, b: int(a) > b})


# The calls of functions of Python and C in what `work` does, and the most bytes that it holds at once.
def count_operations(work) -> tuple[int, int]:
    calls = itertools.count()
    tracemalloc.start()
    sys.setprofile(lambda *event: next(calls))
    work()
    sys.setprofile(None)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return next(calls), held


# Steps of 2 kB.
def write_runs(runs, steps, folder):
    rows = [{"step": step, "eval/accuracy": 0.5, "reward": 1.0, "note": "x" * 2000} for step in range(steps)]
    for number in range(runs):
        a_run(folder / str(number), rows, training={"steps": steps})
    return partial(main, ["runs", str(folder)])


# name: (what is done, its number, how many times as many operations four times that number may take)
WORKS = {
    "groups that never came back": (
        lambda n, _: (
            _Auditor(
                [{"step": 1, "group": Counted(2 * number), "dropped": None} for number in range(n)],
                *([{"step": 1}], {"training.batch_size": 1}, True),
            ).check_prompts
        ),
        *(500, 4.5),
    ),
    "tokens of an audit": (
        lambda n, _: partial(
            _read_batch, pa.record_batch({name: [0] for name in COLUMNS} | {"versions": [[1000] * n]})
        ),
        *(50_000, 1.1),
    ),
    "steps of listed runs": (partial(write_runs, 2), 600, 1.1),
    "listed runs": (lambda runs, folder: write_runs(runs, 9, folder), 20, 4.5),
    "runs of a tree mask": (
        lambda n, _: lambda: Runs.from_lengths([8192 // n] * n, [-1] * n).blocks(None),
        *(256, 4.5),
    ),
    "rows with unknown letters": (
        lambda n, _: lambda: make([{"question": "é" * 25, "answer": "a"}] * n),
        *(100, 4.5),
    ),
    "replicas of a call": (lambda n, _: partial(least_loaded, loads(*[0] * n), request()), 64, 4.5),
}


@pytest.mark.parametrize(("make_work", "number", "limit"), WORKS.values(), ids=WORKS)
def test_work_of_each_operation_grows_linearly_with_input_size(make_work, number, limit, tmp_path):
    few, many = (count_operations(make_work(size, tmp_path / str(size))) for size in (number, 4 * number))
    assert all(more <= limit * less for less, more in zip(few, many, strict=True)), (few, many)
