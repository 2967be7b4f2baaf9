"""Weights that are not what they should be are found within one step, with the tensor and the replica."""

import asyncio
from concurrent.futures import Future

import numpy as np
import pytest

from forge.actors import Generator, Trainer
from forge.actors.identity import POLICY, Identities, UnknownWeights
from forge.actors.staleness import Staleness, StaleWeights
from forge.data.packing import pack
from forge.losses import ReinforceLoss
from forge.runtime.controller import endpoint, run
from forge.runtime.store import CorruptWeights, IncompleteVersion
from forge.types import Completion, Episode

TENSOR = "model.layers.1.mlp.down_proj.weight"


class LossyTrainer(Trainer):
    """Rank 1 leaves a tensor out from its second put on."""

    @endpoint
    def push_weights(self, version: int) -> None:
        weights = self.trainer.weights()
        if version > 0 and self.context.rank == 1:
            del weights[TENSOR]
        self.store.put(POLICY, weights, version)


class DeafGenerator(Generator):
    """Replica 1 lets updates pass."""

    @endpoint(catch_up=True)
    async def update_weights(self, version: int) -> int:
        if version > 0 and self.context.replica == 1:
            return version
        return await Generator.update_weights(self, version)


class CountingGenerator(Generator):
    """Replica 1's engine counts up without new weights."""

    def setup(self) -> None:
        super().setup()
        load = self.engine.update_weights

        def count(named, version: int, identity: str = "") -> Future[None]:
            if version == 0 or self.context.replica == 0:
                return load(named, version, identity)
            done: Future[None] = Future()
            self.engine._batch.decoder.weights.version = version
            self.engine._batch.switch(self.engine._batch.decoder.weights, ())
            done.set_result(None)
            return done

        self.engine.update_weights = count  # type: ignore[method-assign]


class QuietCountingGenerator(CountingGenerator):
    """And nobody looks at what the engine serves."""

    @endpoint(catch_up=True)
    async def update_weights(self, version: int) -> int:
        _, swapped = await asyncio.to_thread(self._load_version, self.store, version, version + 10)
        await asyncio.wrap_future(swapped)
        return version


async def start(model, store, generator=Generator, trainer=Trainer, procs=1, age=None):
    policy, learner = await asyncio.gather(
        generator.options(num_replicas=2, router="round_robin").as_service(model, store=store, max_tokens=6),
        trainer.options(procs=procs).as_actor(
            model,
            loss=ReinforceLoss(),
            store=store,
            optimizer={"learning_rate": 1e-2},
            seq_len=256,
            max_policy_age=age,
        ),
    )
    await learner.push_weights.call(0)
    await policy.update_weights.fanout(0)
    return policy, learner


async def step(policy, trainer, version: int) -> None:
    completions = await asyncio.gather(*(policy.generate.route("abc>", n=2, seed=n) for n in range(4)))
    episodes = [Episode(c, float(n)) for group in completions for n, c in enumerate(group)]
    await trainer.train_step.route(episodes)
    await trainer.push_weights.call(version + 1)
    await policy.update_weights.fanout(version + 1)


@pytest.mark.full
async def test_weight_version_missing_a_shard_is_not_published(model, store):
    policy, trainer = await start(model, store, trainer=LossyTrainer, procs=2)
    with pytest.raises(IncompleteVersion, match=rf"tensor '{TENSOR}' is incomplete: .* were not written"):
        await step(policy, trainer, 0)
    assert store.versions(POLICY) == [0]


@pytest.mark.full
async def test_tokens_from_stale_replica_raise_in_lock_step(model, store):
    policy, trainer = await start(model, store, generator=DeafGenerator, age=0)
    await step(policy, trainer, 0)
    wanted = r"step 1 was given tokens sampled by weight version 0 \(deaf_generator\[1\]\): max_policy_age is 0"
    with pytest.raises(StaleWeights, match=wanted):
        await step(policy, trainer, 1)


@pytest.mark.full
async def test_failed_weight_swap_keeps_previous_generator_weights(model, store):
    policy, trainer = await start(model, store)
    before = await policy.generate.route("abc>", temperature=0.0)
    await trainer.train_step.route([Episode(await policy.generate.route("abc>"), 1.0)])
    await trainer.push_weights.call(1)
    shard = store.manifest(POLICY, 1).by_name[TENSOR][0]
    with (store.root / "segments" / shard.segment).open("r+b") as file:
        file.seek(shard.start + 100)
        file.write(b"damage")
    wanted = rf"policy version 1: tensor '{TENSOR}' does not have the checksum .*\n.*generator\[\d\]"
    with pytest.raises(CorruptWeights, match=wanted):
        await policy.update_weights.fanout(1)
    after = await policy.generate.route("abc>", temperature=0.0)
    assert after.token_ids == before.token_ids
    assert after.identities == {0: store.manifest(POLICY, 0).digest}
    assert after.sampled_by in ("generator[0]", "generator[1]")
    assert set(after.versions) == {0}


@pytest.mark.full
def test_trainer_rejects_tokens_with_wrong_weight_digest(model, store):
    async def main():
        policy, trainer = await start(model, store, generator=QuietCountingGenerator)
        await step(policy, trainer, 0)
        wanted = (
            r"quiet_counting_generator\[1\] says that it sampled with version 1, but its weights equal "
            r"version 0 \(they differ in 'model"
        )
        with pytest.raises(UnknownWeights, match=wanted):
            await step(policy, trainer, 1)

    run(main())


def completion(versions: list[int], identities: dict[int, str]) -> Completion:
    n = len(versions)
    return Completion("", [3] * n, [-1.0] * n, {}, (1, 2), versions, "stop", identities, sampled_by="g[0]")


def batch(versions: list[int], identities: dict[int, str]):
    return pack([Episode(completion(versions, identities), 1.0, advantage=1.0)])


def test_trainer_accepts_known_and_rejects_unknown_weight_digests(store):
    digests = {}
    for version in range(4):
        store.put(POLICY, {"w": np_tensor(version)}, version)
        digests[version] = store.manifest(POLICY, version).digest
    known = Identities(store)
    known.check(batch([1, 1, 3], {1: digests[1], 3: digests[3]}))
    known.check(pack([Episode(prompt_ids=[1], response_ids=[2], advantage=1.0)]))
    for versions, identities, text in (
        (
            [1],
            {1: digests[2]},
            r"g\[0\] says .* version 1, but its weights equal version 2 \(they differ in 'w'",
        ),
        (
            [1, 2],
            {1: digests[1], 2: "unheard"},
            r"version 2, but its weights \(checksum unheard\) were never published",
        ),
        ([9], {9: digests[1]}, r"version 9, which was never published \(there are \[0, 1, 2, 3\]\)"),
        ([2], {}, r"version 2, but not with which weights"),
    ):
        with pytest.raises(UnknownWeights, match=text):
            known.check(batch(versions, identities))
    known.adopt({7: {"earlier"}})
    known.check(batch([7], {7: "earlier"}))
    assert known.recent(3, 1)[2] == {digests[2]}


def test_policy_age_metric_is_measured_per_token():
    for versions, age in (([5, 5], 0), ([4, 5], 1), ([2, 5], 3)):
        Staleness(age).check(batch(versions, {}), 5)
        if age:
            with pytest.raises(StaleWeights, match=rf"version {min(versions)} \(g\[0\]\): max_policy_age is"):
                Staleness(age - 1).check(batch(versions, {}), 5)
    with pytest.raises(StaleWeights, match=r"step 5 was given tokens sampled by weight version 6 .*in the future"):
        Staleness(3).check(batch([5, 6], {}), 5)
    Staleness(0).check(pack([Episode(prompt_ids=[1], response_ids=[2], advantage=1.0)]), 5)
    assert np.array_equal(batch([1], {}).versions, [-1, -1, 1])


def np_tensor(value: int):
    import torch

    return torch.full((3,), float(value))
