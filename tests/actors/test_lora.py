"""Adapters only are published, and generators decode with the merged model."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.actors import Generator, Trainer
from forge.actors.identity import POLICY
from forge.data.packing import pack
from forge.engines import EmbeddedEngine
from forge.losses import ReinforceLoss
from forge.runtime.controller import run
from forge.runtime.store import VersionStore
from forge.types import Episode, Sampling
from tests.actors.respawn import started

PROMPTS = ["abc>", "zyx>", "q>"]
LORA = {"rank": 2, "alpha": 8.0}
SETTINGS: dict[str, Any] = {"loss": ReinforceLoss(), "optimizer": {"learning_rate": 3e-2}, "seq_len": 256}


def trainer(model: str, store: VersionStore, **settings) -> Trainer:
    return started(Trainer(model, store=store, **SETTINGS, **settings))


def generator(model: str, store: VersionStore) -> Generator:
    return started(Generator(model, store=store, max_tokens=8, temperature=0.0))


def published(store: VersionStore, version: int) -> int:
    """Bytes of a version's tensors."""
    return sum(s.box.numel * getattr(torch, s.dtype).itemsize for s in store.manifest(POLICY, version).shards)


async def answers(policy: Generator):
    return [await policy.generate(prompt) for prompt in PROMPTS]


async def learn(learner: Trainer, policy: Generator, steps: int) -> None:
    """From samples, which are checked against what was published."""
    for step in range(steps):
        drawn = [c for p in PROMPTS for c in await policy.generate(p, n=2, temperature=1.0, seed=step)]
        learner.train_step([Episode(c, float(n % 2)) for n, c in enumerate(drawn)])
        learner.push_weights(step + 1)
        assert await policy.update_weights(step + 1) == step + 1


def test_generator_with_lora_adapters_matches_exported_model(model: str, store: VersionStore, tmp_path: Path):
    learner, policy = trainer(model, store, lora=LORA), generator(model, store)

    async def main():
        learner.push_weights(0)
        before = await answers(policy)
        await policy.update_weights(0)
        for first, second in zip(before, await answers(policy), strict=True):
            assert (first.token_ids, first.logprobs) == (second.token_ids, second.logprobs)
        await learn(learner, policy, 3)
        return before, await answers(policy)

    before, after = asyncio.run(main())
    policy.teardown()
    learner.export_model(str(tmp_path / "model"))
    engine = EmbeddedEngine(tmp_path / "model")
    try:
        for completion in after:
            greedy = Sampling(max_tokens=8, temperature=0.0)
            (expected,) = engine.submit(completion.prompt_ids, greedy).result()
            assert completion.token_ids == expected.token_ids
            assert completion.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
            assert completion.identities == {3: store.manifest(POLICY, 3).digest}
    finally:
        engine.close()
    assert any(a.token_ids != b.token_ids for a, b in zip(before, after, strict=True))


def test_lora_trainer_publishes_only_adapters(model: str, store: VersionStore):
    whole, low = trainer(model, store), trainer(model, store, lora=LORA)
    whole.push_weights(0)
    low.push_weights(1)
    # Each adapted layer of (out, in) sends rank (out + in) numbers.
    layers = [p.shape for n, p in whole.trainer.weights().items() if n.endswith("_proj.weight")]
    assert published(store, 1) == 4 * sum(2 * (rows + columns) for rows, columns in layers)
    assert published(store, 1) < 0.2 * published(store, 0)


@pytest.mark.full
def test_two_trainer_ranks_publish_the_same_lora_adapters_as_one(model: str, store: VersionStore):
    """Of a factor of one row the second rank holds nothing."""
    settings = {**SETTINGS, "lora": {"rank": 1, "alpha": 4.0}}
    batch = pack([Episode(prompt_ids=(4, 5, 6), response_ids=[7 + n, 8], advantage=float(n)) for n in range(4)])
    one = started(Trainer(model, store=store, **settings))
    one.train_step(batch)
    one.push_weights(0)
    with store.open(POLICY, 0) as snapshot:
        expected = {name: tensor.clone() for name, tensor in snapshot.tensors()}

    async def main():
        two = await Trainer.options(procs=2).as_actor(model, store=store, **settings)
        await two.train_step.route(batch)
        await two.push_weights.call(1)
        first, second = await two.logprobs.call(batch)
        assert (first == second).all()
        assert first == pytest.approx(one.logprobs(batch), abs=1e-4)

    run(main())
    with store.open(POLICY, 1) as snapshot:
        found = dict(snapshot.tensors())
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5, msg=name)
    assert any(tensor.any() for name, tensor in expected.items() if "lora_B" in name)


def test_mismatched_lora_adapters_raise_and_keep_generator_weights(model: str, store: VersionStore):
    policy = generator(model, store)
    module = "model.layers.7.mlp.down_proj"
    pair = {f"{module}.lora_A.weight": torch.ones(2, 96), f"{module}.lora_B.weight": torch.ones(32, 2)}
    store.put(POLICY, pair, 1)
    store.put(POLICY, {**pair, "model.norm.weight": torch.ones(32)}, 2)

    async def main():
        for version, message in ((1, rf"'{module}.lora_A.weight' has no base"), (2, "'model.norm.weight' is not a")):
            with pytest.raises(ValueError, match=message):
                await policy.update_weights(version)
            assert (policy.engine.version, policy.engine.identity) == (0, "")

    asyncio.run(main())
    policy.teardown()
