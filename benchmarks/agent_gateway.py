"""The gateway against the native loop and against direct generation.

Against the loop: CPU-seconds of a 20-turn episode, and the time that the gateway adds to a request.

Both sides use one embedded engine in this process, with the same prompts and numbers of tokens, in turn. A client in
another process asks the gateway by raw HTTP and waits for each answer, so that the CPU time here is the server's. Added
time is that of the client's wait during which no engine has its request.

Against direct generation (`--clients`): requests a second and the time of a request, of concurrent clients that each
ask for one answer after the other. The engine is a service in a separate process. One side calls its endpoint; the
other asks a gateway in a third process, with a session for each client. Prompts and numbers of tokens are the same.

    python benchmarks/agent_gateway.py --rounds 7
    python benchmarks/agent_gateway.py --rounds 5 --clients 1 8 64
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import torch
from forced_gateway import byte_tokenizer
from sides import cpu_seconds
from transformers import Qwen3Config, Qwen3ForCausalLM

from forge.actors import Generator
from forge.engines import load_engine
from forge.envs.config import EpisodeConfig
from forge.runtime.controller import shutdown
from forge.types import Completion, Sampling
from forge_agents.actor import GatewayActor, PolicySettings
from forge_agents.gateway import Gateway
from forge_agents.listener import SharedListener
from forge_agents.policies import Policy
from forge_agents.settings import SessionSettings
from forge_envs import Action, Dialogue, Environment, Step
from forge_envs.rollout import rollout
from forge_http.web import bind

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


def make_model(folder: str) -> Any:
    """Write a model of 3.2M random parameters; return its tokenizer."""
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = Qwen3Config(
        vocab_size=len(tokenizer), num_key_value_heads=2, head_dim=64, max_position_embeddings=8192, **sizes
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


Ask = Callable[[int, str], Awaitable[int]]  # client number and question to the number of tokens of the answer


async def drive(ask: Ask, clients: int, requests: int, name: str) -> dict[str, Any]:
    """The seconds of `requests` requests of so many clients at once, and the CPU-seconds of all processes."""
    numbers = iter(range(requests))
    seconds: list[float] = []
    tokens = 0

    async def work(number: int) -> None:
        nonlocal tokens
        for request in numbers:
            begun = time.perf_counter()
            tokens += await ask(number, f"{name}{request:4}: {QUESTION}")
            seconds.append(time.perf_counter() - begun)

    begun = time.perf_counter()
    cpu = cpu_seconds()
    await asyncio.gather(*(work(number) for number in range(clients)))
    return {
        "requests/s": requests / (time.perf_counter() - begun),
        "cpu": (cpu_seconds() - cpu) / requests,
        "tokens": tokens,
        "seconds": seconds,
    }


async def compare_requests(options: argparse.Namespace) -> None:
    """Measure direct generation and the gateway in turn, and print a table."""
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/model"
        tokenizer = make_model(model)
        dialogue = Dialogue(tokenizer, "chatml")
        service = await Generator.options(num_replicas=1).as_service(model, slots=64)
        episode = EpisodeConfig(template="chatml", max_tokens=4000)
        listener = SharedListener()
        policies = {"policy": PolicySettings(service, model, episode)}
        gateway = await GatewayActor.options(num_replicas=1).as_service(
            policies, listener.path, Path(folder) / "journal"
        )
        limits = {"max_turns": 1 << 20, "max_tokens": 4000, "max_turn_tokens": options.tokens}
        access = [
            await gateway.open.route(SessionSettings(name=f"client {number}", **limits), f"{number:032x}")
            for number in range(max(options.clients))
        ]
        sampling = {"n": 1, "max_tokens": options.tokens, "stop_token_ids": dialogue.stop_ids}
        seeds = itertools.count()

        async def direct(number: int, question: str) -> int:
            ids = dialogue.initial([{"role": "user", "content": question}])
            (turn,) = await service.generate.route(ids, seed=next(seeds), **sampling)
            return len(turn.token_ids)

        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:

            async def asked(number: int, question: str) -> int:
                body = {"model": "policy", "messages": [{"role": "user", "content": question}]}
                headers = {"Authorization": f"Bearer {access[number].key}"}
                url = f"{access[number].url}/v1/chat/completions"
                async with http.post(url, json=body, headers=headers) as answer:
                    return int((await answer.json())["usage"]["completion_tokens"])

            sides: dict[str, Ask] = {"direct": direct, "gateway": asked}
            print(f"{torch.backends.cpu.get_cpu_capability()}, {options.tokens} tokens, {options.rounds} rounds")
            print("| clients | side | requests/s | CPU-ms a request | p50 | p99 |")
            for clients in options.clients:
                results: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
                for number in range(options.rounds + 1):
                    for name, ask in sides.items():
                        # The same questions on both sides, others in each round.
                        row = await drive(ask, clients, max(32, 4 * clients), f"{clients}/{number:3}/")
                        if number:  # the first round warms up
                            results[name].append(row)
                show(clients, results)
        listener.close()
    await shutdown()


def show(clients: int, results: dict[str, list[dict[str, Any]]]) -> None:
    """Print the medians of both sides, and what the gateway adds."""
    percentiles: dict[str, tuple[float, float]] = {}
    for name, rows in results.items():
        rate = statistics.median(row["requests/s"] for row in rows)
        cpu = 1e3 * statistics.median(row["cpu"] for row in rows)
        ordered = [sorted(row["seconds"]) for row in rows]
        p50, p99 = (1e3 * statistics.median(times[int(len(times) * part)] for times in ordered) for part in (0.5, 0.99))
        percentiles[name] = p50, p99
        print(f"| {clients} | {name} | {rate:.1f} | {cpu:.1f} | {p50:.1f} ms | {p99:.1f} ms |")
    added = [late - early for early, late in zip(percentiles["direct"], percentiles["gateway"], strict=True)]
    pairs = zip(results["direct"], results["gateway"], strict=True)
    ratios = [two["requests/s"] / one["requests/s"] for one, two in pairs]
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"| {clients} | added | ratio {spread} | | {added[0]:+.1f} ms | {added[1]:+.1f} ms |", flush=True)


async def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=32, help="of a turn")
    parser.add_argument("--clients", type=int, nargs="+", help="compare with direct generation, with so many at once")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.clients:
        await compare_requests(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_model(folder)
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
