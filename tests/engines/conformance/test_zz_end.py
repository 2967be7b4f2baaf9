"""The end of the shared engine: the last module, by its name."""

from typing import Any

import pytest

from forge.types import Sampling

from .conftest import SLOTS, Subject, processes, wait_for


def test_closing_engine_fails_open_requests_and_stops_processes(subject: Subject) -> None:
    engine: Any = subject.ready()
    assert bool(processes() - subject.others) == (subject.name == "vllm")
    futures = [engine.submit([1], Sampling(n=SLOTS, max_tokens=500)) for _ in range(20)]
    wait_for(lambda: engine.stats()["running"] > 0)
    engine.close()
    engine.close()
    for future in futures:
        error = future.exception(5)
        assert error is None or "closed" in str(error)
    assert futures[-1].exception(5) is not None
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit([1], Sampling())
    assert "closed" in str(engine.update_weights([], 1).exception(5))
    with pytest.raises(RuntimeError, match="closed"):
        engine.release()
    wait_for(lambda: not processes() - subject.others)
    subject.engine = None
