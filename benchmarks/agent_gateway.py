"""The gateway against the native loop: CPU-seconds of a 20-turn episode, and the time that it adds to a request.

Both sides use one embedded engine in this process, with the same prompts and numbers of tokens, in turn. A client in
another process asks the gateway by raw HTTP and waits for each answer, so that the CPU time here is the server's. Added
time is that of the client's wait during which no engine has its request.

    python benchmarks/agent_gateway.py --rounds 7
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from forced_gateway import byte_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from forge.engines import load_engine
from forge.envs import Action, Dialogue, Environment, Step
from forge.envs.rollout import rollout
from forge.system.web import bind
from forge.types import Completion, Sampling
from forge_agents.gateway import Gateway
from forge_agents.policies import Policy
from forge_agents.settings import SessionSettings

QUESTION = "What comes next?"
MORE = "And then?"


class EnginePolicy:
    """The embedded engine with the endpoints of a generator."""

    def __init__(self, folder: str) -> None:
        self.engine = load_engine("embedded", folder, slots=16)
        self.seconds: list[float] = []  # of each request, in the engine
        self.generate = SimpleNamespace(route=self._generate)

    @asynccontextmanager
    async def session(self, name: str | None = None) -> AsyncIterator[None]:
        """Nothing: there is one engine."""
        yield

    async def _generate(self, prompt: list[int], n: int | None = None, **sampling: Any) -> Any:
        future = self.engine.submit(prompt, Sampling(n=n or 1, **sampling))
        begun = time.perf_counter()
        turns: list[Completion] = await asyncio.wrap_future(future)
        self.seconds.append(time.perf_counter() - begun)
        for turn in turns:
            turn.versions = [0] * len(turn.token_ids)
        return turns[0] if n is None else turns


class Repeated(Environment):
    """An environment that asks for more, whatever the answer."""

    async def reset(self, task: Any, *, seed: int) -> Step:
        return Step(({"role": "user", "content": QUESTION},))

    async def step(self, action: Action) -> Step:
        return Step(({"role": "user", "content": MORE},))


def client(url: str, key: str, turns: int, connection: Any) -> None:
    """Play an episode, and send the seconds that each request took."""
    messages = [{"role": "user", "content": QUESTION}]
    seconds = []
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    for _ in range(turns):
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        begun = time.perf_counter()
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/chat/completions", body, headers)) as answer:
            message = json.load(answer)["choices"][0]["message"]
        seconds.append(time.perf_counter() - begun)
        messages += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": MORE}]
    connection.send(seconds)


async def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=32, help="of a turn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = byte_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
        config = Qwen3Config(
            vocab_size=len(tokenizer), num_key_value_heads=2, head_dim=64, max_position_embeddings=8192, **sizes
        )
        Qwen3ForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        policy = EnginePolicy(folder)
        dialogue = Dialogue(tokenizer, "chatml")
        limits = {"max_turns": options.turns, "max_tokens": 4000, "max_turn_tokens": options.tokens}
        results: dict[str, list[tuple[float, int]]] = {"native loop": [], "gateway": []}
        latencies: list[float] = []
        gateway = Gateway({"policy": Policy(policy, dialogue)}, Path(folder) / "journal")
        spawn = multiprocessing.get_context("spawn")
        async with gateway.listen(bind("127.0.0.1", 0)) as url:
            for number in range(options.rounds + 1):
                cpu = time.process_time()
                episode = await rollout(policy, Repeated(), "task", dialogue=dialogue, seed=number, **limits)
                native = (time.process_time() - cpu, sum(episode.mask))
                policy.seconds.clear()
                access = gateway.open(SessionSettings(seed=number, **limits))
                ours, theirs = spawn.Pipe()
                process = spawn.Process(target=client, args=(url, access.key, options.turns, theirs))
                process.start()
                while not gateway.sessions[access.key].counts["requests"]:
                    await asyncio.sleep(0.01)  # the client imports its packages
                cpu = time.process_time()
                await asyncio.to_thread(process.join)
                spent = time.process_time() - cpu
                record = await gateway.close(access.key)
                account = record.episode("policy", 1.0)
                assert account is not None
                gateway.forget(access.key)
                seconds = ours.recv()
                if number:  # the first round warms up
                    results["native loop"].append(native)
                    results["gateway"].append((spent, sum(account.mask)))
                    latencies += [wait - engine for wait, engine in zip(seconds, policy.seconds, strict=True)]
        policy.engine.close()
    per_token = {name: [cpu / tokens for cpu, tokens in pairs] for name, pairs in results.items()}
    print(f"{torch.backends.cpu.get_cpu_capability()}, one thread, {options.turns} turns, medians of {options.rounds}")
    for name, values in per_token.items():
        print(f"{name}: {1e3 * statistics.median(values):.3f} CPU-ms a token")
    ratios = [b / a for a, b in zip(per_token["native loop"], per_token["gateway"], strict=True)]
    print(f"ratio: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    ordered = sorted(latencies)
    p50, p99 = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
    print(f"added to a request: p50 {1e3 * p50:.1f} ms, p99 {1e3 * p99:.1f} ms")


if __name__ == "__main__":
    asyncio.run(main())
