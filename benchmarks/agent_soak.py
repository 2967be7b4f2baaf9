"""A run of agents that loses its processes: 64 at once, and every 30 s generator, trainer or gateway is killed.

python -m benchmarks.agent_soak --minutes 10

At the end every token of every episode must be trained once or be in the account with a reason, no episode may have
trained twice, and none may have a reward that its agent did not give. It prints one line of figures, or fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai

import forge
from benchmarks.machine import descendants
from forge.observability.rollouts import read_batches
from forge.recipes.preemption import Preempted
from forge.types import Sample
from forge_agents.record import EXCLUSIONS

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '>' }}{% endfor %}"
VICTIMS = ("generator", "trainer", "gateway")
LOWEST = 0.5  # that the agent gives: an episode with less was not scored by it
ROUNDING = 1e-5  # nats between engine and trainer


async def play(client: openai.AsyncOpenAI, sample: Sample) -> float:
    """A conversation of three turns with a sub-agent, streamed and not; longer answers earn more."""
    messages: list[Any] = [{"role": "user", "content": sample.prompt.text}]
    length = 0
    for turn in range(3):
        if turn == 1:
            side: list[Any] = [{"role": "user", "content": f"check {sample.prompt.text}"}]
            await client.chat.completions.create(model="policy", messages=side)
        if turn == 2:
            stream = await client.chat.completions.create(model="policy", messages=messages, stream=True)
            answer = "".join([piece.choices[0].delta.content or "" async for piece in stream if piece.choices])
        else:
            reply = await client.chat.completions.create(model="policy", messages=messages)
            answer = reply.choices[0].message.content or ""
        length += len(answer)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "sure?"}]
    return LOWEST + length / 100


def kill(victim: str, spared: Collection[int] = ()) -> bool:
    """Kill the process of this run whose name begins so, none of the spared; whether there was one."""
    for pid in descendants(os.getpid())[1:]:
        if pid in spared:
            continue
        try:
            name = Path(f"/proc/{pid}/comm").read_text()
        except OSError:  # it has ended
            continue
        if name.startswith(victim):
            os.kill(pid, signal.SIGKILL)
            return True
    return False


@contextmanager
def killing(every: float, seed: int = 0) -> Iterator[Counter[str]]:
    """Kill a process of the run every so many seconds within the block; yields how often which was killed."""
    killed: Counter[str] = Counter()
    ended = threading.Event()
    rng = random.Random(seed)

    def kill_some() -> None:
        while not ended.wait(every):
            victim = rng.choice(VICTIMS)
            killed[victim] += kill(victim)

    thread = threading.Thread(target=kill_some, daemon=True)
    thread.start()
    try:
        yield killed
    finally:
        ended.set()
        thread.join()


def settings(root: Path, steps: int, agents: int) -> dict[str, Any]:
    """The run: a tiny model, checkpoints that a lost trainer comes back from, and every rollout recorded."""
    return {
        "from_scratch": {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1, "max_positions": 256},
        "dataset": {"task": "apps.toys.expressions:Expression", "difficulty": [2, 2]},
        "training": {"batch_size": 8, "steps": steps, "learning_rate": 1e-3, "seq_len": 256},
        "grpo": {"n_samples": 4, "max_tokens": 12},
        "async": {"max_policy_age": 2},
        "checkpoint": {"every": 5},
        "eval": {"problems": 0},
        "metrics": {"rollouts": "all"},
        "services": {"generator": {"max_restarts": 50}, "trainer": {"max_restarts": 50}},
        "episode": {
            "max_turns": 8,
            "max_tokens": 160,
            "template": TEMPLATE,
            "agent": {"function": play, "concurrency": agents, "timeout": 300.0},
        },
        "run": {"name": "soak", "root": str(root)},
    }


def check(folder: Path) -> dict[str, float]:
    """The figures of a run that has ended. AssertionError: tokens were lost, doubled, or paid by a failure."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    sums = Counter[str]()
    for row in rows:
        sums.update({name: value for name, value in row.items() if name.startswith(("certificate/", "dropped/"))})
        assert row.get("train/engine_difference", 0.0) < ROUNDING, (
            f"step {row['step']}: {row['train/engine_difference']}"
        )
    excluded = sum(sums[f"certificate/{name}"] for name in EXCLUSIONS)
    assert sums["certificate/sampled"] == sums["certificate/trained"] + excluded, dict(sums)
    trained: Counter[tuple[int, ...]] = Counter()
    tokens = 0
    columns = ("step", "group", "sample", "branch", "reward", "dropped", "length")
    for _, batch in read_batches(folder / "rollouts.arrow", columns):
        for row in batch.to_pylist():
            if row["dropped"] not in (None, "zero_advantage"):
                continue
            trained[row["group"], row["sample"], row["branch"]] += 1
            tokens += row["length"]
            assert row["reward"] >= LOWEST, f"a failure was paid: {row}"
    assert max(trained.values()) == 1, "an episode was trained twice"
    in_batches = sums["certificate/batch"] + sums["certificate/idle"]
    assert tokens == in_batches, f"{tokens} tokens were recorded, and {in_batches} trained"
    last = rows[-1]["step"]
    steps = {row["step"] for row in rows}
    assert steps == set(range(int(last) + 1)), "a step is missing"
    return {
        "steps": last,
        "episodes": len({key[:2] for key in trained}),
        "tokens": tokens,
        "orphan": sums["certificate/orphan"],
        "unscored": sums["certificate/unscored"],
        "dropped": sum(value for name, value in sums.items() if name.startswith("dropped/")),
    }


def soak(root: Path, *, steps: int, agents: int, every: float, seconds: float | None = None) -> dict[str, float]:
    """Run so many steps or seconds, with kills; the figures. AssertionError: as of `check`."""
    config = settings(root, steps, agents)
    config["run"]["save_before"] = seconds
    with killing(every) as killed, suppress(Preempted):
        forge.train(None, **config)
    return {**check(root / "soak"), **{f"killed {name}": count for name, count in killed.items()}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two kills")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        limits = {"steps": 100_000, "seconds": 60 * arguments.minutes}
        print(json.dumps(soak(Path(folder), agents=arguments.agents, every=arguments.every, **limits)))
