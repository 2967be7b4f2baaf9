"""A panel: all at once, and one failing only."""

import asyncio
import math
import threading
import time

import numpy as np

from forge.rewards import Scores
from forge_verifiers import AnswerFrequency, Panel, Rule
from forge_verifiers.threads import Batcher


class Counting:
    """The length of a response times a factor; remembers what it was asked."""

    def __init__(self, name="length", factor=1.0, fails=()):
        self.names, self.factor, self.fails = (name, f"{name}_again"), factor, set(fails)
        self.asked, self.closed = [], 0

    async def score(self, prompt, responses, target=None):
        self.asked += responses
        values = np.array([[len(r) * self.factor, len(prompt)] for r in responses], dtype=float)
        reasons = {(i, 0): "too odd" for i, r in enumerate(responses) if r in self.fails}
        for where in reasons:
            values[where] = math.nan
        return Scores(values, reasons)

    async def close(self):
        self.closed += 1


def raising(prompt, response, target):
    raise OSError("gone")


class Broken:
    names = ("broken",)

    async def score(self, prompt, responses, target=None):
        raise OSError("gone")


class Slow:
    names = ("slow",)

    async def score(self, prompt, responses, target=None):
        await asyncio.sleep(30)


class Wrong:
    names = ("wrong",)

    async def score(self, prompt, responses, target=None):
        return Scores(np.zeros((len(responses) + 1, 1)))


class Silent:
    names = ("silent",)

    async def score(self, prompt, responses, target=None):
        return Scores(np.array([[1.0], [math.inf]]))


class Reader:
    """Reads one response after the other, 0.03 s each, whoever asks; remembers which."""

    names = ("reader",)

    def __init__(self):
        self.read, self.go_on = [], threading.Event()
        self.batcher = Batcher(self.compute, "reader")

    def compute(self, texts):
        for number, text in enumerate(texts):
            self.read.append(text)
            if text == "stuck":
                self.go_on.wait(30)
            time.sleep(0.03)
            yield number, float(len(text))

    @property
    def progress(self):
        return self.batcher.progress

    async def score(self, prompt, responses, target=None):
        return Scores.from_outcomes(await self.batcher(responses), 1)

    async def close(self):
        self.batcher.close()


def score(panel, responses, prompt="prompt", target=None):
    return asyncio.run(panel.score(prompt, responses, target))


def test_failing_panel_verifier_is_unscored_with_reason():
    panel = Panel([Counting(fails=["bb"]), Broken(), Slow(), Wrong(), Silent()], timeout=0.2)
    assert panel.names == ("length", "length_again", "broken", "slow", "wrong", "silent")
    found = score(panel, ["a", "bb"])
    np.testing.assert_array_equal(
        found.values, [[1, 6, math.nan, math.nan, math.nan, 1], [math.nan, 6, math.nan, math.nan, math.nan, math.nan]]
    )
    assert set(found.reasons) == {(i, j) for i in (0, 1) for j in (2, 3, 4)} | {(1, 0), (1, 5)}
    assert (found.reasons[1, 0], found.reasons[0, 2]) == ("too odd", "OSError: gone")
    assert found.reasons[0, 3] == "the verifier took more than 0.2 s"
    assert "shape (3, 1) for 2 responses" in found.reasons[0, 4]
    assert found.reasons[1, 5] == "it gave no reason"
    assert panel.missing["broken: OSError: gone"] == 2
    assert score(panel, []).values.shape == (0, 6)


def test_stuck_or_closed_panel_verifier_is_unscored_with_reason():
    async def some():
        reader = Reader()
        panel = Panel([reader], timeout=0.3)
        stuck = await asyncio.gather(panel.score("p", ["stuck"]), panel.score("p", ["a"]))
        waiting = asyncio.create_task(panel.score("p", ["b"]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await panel.close()
        reader.go_on.set()
        return [found.reasons[0, 0] for found in (*stuck, await waiting, await panel.score("p", ["c"]))]

    stuck, other, waiting, closed = asyncio.run(some())
    assert stuck == other == "the verifier made no progress for 0.3 s"
    assert waiting == "the verifier was cancelled"
    assert closed == "RuntimeError: cannot schedule new futures after shutdown"


def test_nested_verifier_panels_score_and_close_all_verifiers():
    inner, verifier = Panel([Rule(raising)]), Counting()
    panel = Panel([inner, verifier, AnswerFrequency()])
    np.testing.assert_array_equal(score(panel, ["1", "1"]).values, [[math.nan, 1, 6, 1], [math.nan, 1, 6, 1]])
    asyncio.run(panel.close())
    assert verifier.closed == 1
