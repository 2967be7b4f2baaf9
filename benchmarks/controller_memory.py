"""Does the controller grow? Its resident memory over many calls of a recipe's own verbs, and the event loop's stalls.

    OMP_NUM_THREADS=1 python benchmarks/controller_memory.py --calls 1000000

Data set and replay buffer live in the controller, as in a recipe; the reward is a real process. One round is what the
rollouts of a step and its training call: `admit`, `dataset.sample`, `buffer.add`, `buffer.sample`, `forget`,
`advance`, and for every `--remote`-th prompt `reward.evaluate_group`. A second task measures how late the event loop
wakes it: tokenising must not block it for more than 20 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path

from forge.actors import DatasetActor, ReplayBuffer, RewardActor
from forge.models.tokenizer import character_tokenizer
from forge.runtime.controller import drain_metrics, run
from forge.types import Episode, Group


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def main(args: argparse.Namespace, folder: Path) -> None:
    rows = folder / "rows.jsonl"
    text = "a prompt of some length, " * args.length
    rows.write_text("\n".join(json.dumps({"question": f"{text}{i}", "answer": str(i)}) for i in range(256)))
    character_tokenizer().save_pretrained(folder / "tokenizer")
    dataset = await DatasetActor.as_local(str(folder / "tokenizer"), path=str(rows), remember=1 << 16)
    buffer = await ReplayBuffer.as_local(256, max_policy_age=1, batch_size=32)
    reward = await RewardActor.as_service(["ExactMatch"])
    late, done = [0.0], asyncio.Event()

    async def watch() -> None:
        while not done.is_set():
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            late.append(time.perf_counter() - before - 0.001)

    watching = asyncio.create_task(watch())
    calls, version, first = 0, 0, 0.0
    while calls < args.calls:
        for number in range(32):
            await buffer.admit.route()
            prompt, target = await dataset.sample.route()
            if number % args.remote == 0:
                await reward.evaluate_group.route(prompt, ["1", "2"], target)
                calls += 1
            episodes = [
                Episode(prompt_ids=prompt.token_ids[:8], response_ids=[1, 2], reward=float(i)) for i in range(2)
            ]
            await buffer.add.route(Group(episodes, prompt.index, target, prompt.text))
            calls += 3
        await buffer.sample.route(version, 32)
        await dataset.forget.route(await buffer.handled.route())
        version += 1
        await buffer.advance.route(version)
        calls += 4
        if version % 50 == 0:
            await drain_metrics()
        if not first and calls >= args.calls / 10:
            first = resident_mb()
    done.set()
    await watching
    last = resident_mb()
    late.sort()
    print(f"{calls} calls: {first:.0f} MB after a tenth of them, {last:.0f} MB at the end, {last - first:+.0f} MB")
    print(f"event loop late by {late[-1] * 1e3:.1f} ms at most, {late[int(len(late) * 0.999)] * 1e3:.1f} ms at p99.9")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--remote", type=int, default=32, help="every so many prompts call the reward's process")
    parser.add_argument("--length", type=int, default=40, help="repetitions of 25 characters in a prompt")
    with tempfile.TemporaryDirectory() as name:
        run(main(parser.parse_args(), Path(name)))
