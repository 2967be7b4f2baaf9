"""Actors and helpers of Meta's torchforge by its names."""

import asyncio
import logging
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from forge.observability.metric_actors import get_or_create_metric_logger
from forge.util.config import parse
from forge.util.ops import compute_logprobs
from transformers import AutoModelForCausalLM

from forge.actors import Generator, RewardActor, Trainer
from forge.actors.reference import ReferenceModel as NativeReference
from forge.losses import ReinforceLoss
from forge.observability import Reduce, record_metric
from forge.runtime.controller import ServiceStopped, endpoint, run, shutdown
from forge_compat import store
from forge_compat.actors import ReferenceModel, ReplayBuffer, TitanTrainer
from forge_sandbox import SandboxedPythonCoder


@dataclass
class OwnEpisode:
    """An episode as torchforge's GRPO program defines one."""

    number: int
    policy_version: int


def collated(parts):
    return [[episode.number for episode in part] for part in parts]


def test_torchforge_replay_buffer_sample_is_split_over_dp_ranks():
    async def main():
        buffer = await ReplayBuffer.as_local(batch_size=2, dp_size=2, max_policy_age=1, collate=collated, order="fifo")
        assert await buffer.sample.call_one(curr_policy_version=0) is None
        for number in range(5):
            await buffer.add.call_one(OwnEpisode(number, policy_version=number % 2))
        # Those of version 0 are too old for version 2: numbers 1 and 3 are left.
        await buffer.evict.call_one(curr_policy_version=2)
        assert (await buffer.counts.route())["too_old"] == 3
        assert await buffer.sample.call_one(curr_policy_version=2) is None
        for number in range(5, 8):
            await buffer.add.call_one(OwnEpisode(number, policy_version=2))
        assert await buffer.sample.call_one(curr_policy_version=2) == [[1, 3], [5, 6]]
        await buffer.clear.call_one()
        assert (await buffer.counts.route())["size"] == 0
        await shutdown()

    asyncio.run(main())
    with pytest.raises(TypeError, match="'max_buffer_size': torchforge's max_buffer_size is capacity"):
        ReplayBuffer.as_actor(batch_size=2, max_buffer_size=8)


@pytest.mark.processes
def test_torchforge_reference_forward_matches_transformers(model):
    tokens = torch.randint(3, 20, (3, 12), generator=torch.Generator().manual_seed(0))
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        expected = policy(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[:, 4:, 0]

    async def main():
        reference = await ReferenceModel.as_local(model)
        return await reference.forward.route(tokens, 5, return_logprobs=True)

    scores = run(main())
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected, atol=2e-5, rtol=0)
    with pytest.raises(ValueError, match="forward cannot return logits"):
        ReferenceModel(model).forward(tokens, 5, return_logprobs=False)
    with pytest.raises(ValueError, match=r"got \(3, 12\) with max_req_tokens = 12"):
        ReferenceModel(model).forward(tokens, 12)


def logits_loss(logits, response, ref_logprobs, advantages, padding_mask, beta=0.1):
    """A loss as torchforge's programs have it, which takes logits."""
    logprobs = compute_logprobs(logits, response)
    difference = ref_logprobs - logprobs
    losses = beta * (difference.exp() - difference - 1) - (logprobs - logprobs.detach()).exp() * advantages
    return ((losses * padding_mask).sum(1) / padding_mask.sum(1).clamp(min=1)).mean()


@pytest.mark.full
@pytest.mark.processes
async def test_torchforge_actor_program_samples_trains_and_updates_weights(model):
    section = {"name": "qwen3", "hf_assets_path": f"hf://{model}"}
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    await store.initialize(mesh=None, strategy=store.LocalRankStrategy())
    engine = {"model": str(model), "tensor_parallel_size": 1, "enforce_eager": False}
    generator, trainer, reference = await asyncio.gather(
        Generator.options(procs=1).as_service(engine_args=engine, sampling_params={"n": 4, "max_tokens": 4}),
        TitanTrainer.as_actor(
            model=section,
            training={"seq_len": 64},
            optimizer={
                "name": "AdamW",
                "lr": 1e-2,
                "max_grad_norm": 0,
                "eps": 1e-2,
            },  # else tiny gradients count by sign
            loss=logits_loss,
        ),
        NativeReference.as_service(model=section, training={"seq_len": 64, "dtype": "float32"}),
    )
    await trainer.setup.call()
    completions = await generator.generate.route("abc>")
    assert [completion.prompt for completion in completions] == ["abc>"] * 4
    response = torch.zeros(4, 4, dtype=torch.long)
    for row, completion in zip(response, completions, strict=True):
        row[: len(completion.token_ids)] = completion.token_ids.to(torch.long)
    tokens = torch.cat([completions[0].prompt_ids.repeat(4, 1), response], dim=1)

    ref_logprobs = await reference.forward.route(tokens, tokens.shape[1] - 4, return_logprobs=True)
    # Advantages without the mean 0 and another reference, so that loss and gradient are not 0.
    advantages = torch.tensor([[1.0], [-0.5], [2.0], [0.25]])
    target = {
        **{"response": response, "advantages": advantages, "padding_mask": response != 0},
        "ref_logprobs": ref_logprobs - 0.5,
    }
    loss = logits_loss(policy(tokens).logits, **target)
    loss.backward()
    torch.optim.AdamW(policy.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-2, weight_decay=0.0).step()
    expected = [loss.item(), logits_loss(policy(tokens).logits, **target).item()]
    steps = [await trainer.train_step.call([{"tokens": tokens}], [target]) for _ in range(2)]
    assert [[*step.items()] for step in steps] == [[(0, pytest.approx(number, abs=1e-5))] for number in expected]
    assert min(abs(expected[0]), abs(expected[1] - expected[0])) > 1e-3  # a hundred times what they may differ by

    await trainer.push_weights.call(policy_version=1)
    assert await generator.update_weights.fanout(policy_version=1) == [1]
    assert [completion.generator_version for completion in await generator.generate.route("abc>", n=1)] == [1]
    await trainer.mesh.stop()
    with pytest.raises(ServiceStopped):
        await trainer.push_weights.call(2)
    await store.shutdown()


def test_torchforge_sections_configure_trainer():
    trainer = TitanTrainer(
        model={"name": "qwen3", "flavor": "1.7B", "hf_assets_path": "hf://Qwen/Qwen3-1.7B"},
        optimizer={"name": "AdamW", "lr": 1e-5, "eps": 1e-7},
        lr_scheduler={"warmup_steps": 3},
        training={"local_batch_size": 16, "seq_len": 2048, "max_norm": 0.5, "dtype": "bfloat16", "gc_freq": 1},
        compile={"enable": False},
        parallelism={"tensor_parallel_degree": 2, "disable_loss_parallel": True},
        checkpoint={"enable": True, "folder": "./checkpoint", "interval": 500},
        activation_checkpoint={"mode": "selective", "selective_ac_option": "op"},
        loss=ReinforceLoss(clip_ratio=0.2),
    )
    assert trainer.model == "Qwen/Qwen3-1.7B"
    settings = trainer.optimizer
    assert (settings.learning_rate, settings.epsilon, settings.warmup_steps) == (1e-5, 1e-7, 3)
    assert settings.max_grad_norm == 0.5
    assert trainer.settings == {
        "backend": "titan" if find_spec("torchtitan") else "fsdp",
        "seq_len": 2048,
        "dtype": "bfloat16",
        "compile": False,
        "gradient_checkpointing": True,
    }
    assert trainer.layout.tensor_parallel_degree == 2
    loss = ReinforceLoss(clip_ratio=0.2)
    assert TitanTrainer("m", optimizer={"learning_rate": 1.0}, loss=loss).optimizer.learning_rate == 1.0
    with pytest.raises(TypeError, match=r"no setting for training.mixed_precision = 'x' \(docs/start/from_torchforge"):
        TitanTrainer("m", training={"mixed_precision": "x"}, loss=loss)
    with pytest.raises(ValueError, match="model needs the key hf_assets_path"):
        TitanTrainer({"name": "qwen3"}, loss=loss)


def titan(**settings):
    return TitanTrainer(**{"model": "m", "loss": ReinforceLoss(clip_ratio=0.2), **settings})


def test_unsupported_torchforge_sections_raise():
    for name, value in (("SGD", "'SGD'"), ("Adam", "'Adam'"), (3, "3")):
        with pytest.raises(ValueError, match=f"^optimizer.name must be AdamW, got {value}: others are optimizer="):
            titan(optimizer={"name": name, "lr": 1e-5})
    with pytest.raises(TypeError, match=r"no setting for lr_scheduler\.decay_ratio = 0\.8"):
        titan(lr_scheduler={"decay_ratio": 0.8})
    with pytest.raises(TypeError, match="optimizer must be a mapping of its settings, got 'AdamW'"):
        titan(optimizer="AdamW")
    for mode, is_on in ((None, False), ("none", False), ("selective", True), ("full", True)):
        assert titan(activation_checkpoint={"mode": mode}).settings["gradient_checkpointing"] is is_on
    with pytest.raises(ValueError, match=r"activation_checkpoint\.mode must be one of none, selective, .*'some'"):
        titan(activation_checkpoint={"mode": "some"})


LOSS = {"model": "m", "loss": ReinforceLoss(clip_ratio=0.2)}


@pytest.mark.parametrize(
    ("component", "settings", "error", "message"),
    [
        (Generator, {"model": "m", "foo": 1}, TypeError, "unknown key 'foo'"),
        (Generator, {"engine_args": {}}, ValueError, r"engine_args needs the key model .*, got {}"),
        (
            Generator,
            {"engine_args": {"model": "m"}, "sampling_params": {"n": 0}},
            ValueError,
            "n must be a whole number",
        ),
        (RewardActor, {"functions": [len], "weights": [1.0, 2.0]}, ValueError, "weights"),
        (SandboxedPythonCoder, {"memory": 1}, TypeError, "memory"),
        (NativeReference, {"model": {"name": "qwen3"}}, ValueError, "model needs the key hf_assets_path"),
        (Generator, {"model": "m", "slots": "8"}, ValueError, "slots must be a whole number"),
        (Generator, {"model": None}, ValueError, "model must be a directory or hub id, got None"),
        (Generator, {"model": "m", "sampling": {"foo": 1}}, TypeError, "unexpected keyword argument 'foo'"),
        (Generator, {"model": "m", "max_tokens": 0}, ValueError, "max_tokens must be at least 1, got 0"),
        (ReferenceModel, {"model": "m", "foo": 1}, TypeError, "unknown key 'foo'"),
        (Trainer, {**LOSS, "foo": 1}, TypeError, "unknown key 'foo'"),
        (Trainer, {**LOSS, "lora": {"rnk": 8}}, TypeError, "unknown key 'lora.rnk'"),
        (Trainer, {**LOSS, "head": "tail"}, ValueError, "head must be one of policy, value, reward; got 'tail'"),
        (Trainer, {**LOSS, "temperature": 0}, ValueError, "temperature must be"),
        (Trainer, {**LOSS, "parallelism": {"degree": 2}}, TypeError, "unknown key 'degree'"),
        (TitanTrainer, {**LOSS, "foo": 1}, TypeError, "unknown key 'foo'"),
        (TitanTrainer, {**LOSS, "optimizer": {"lrr": 1}}, TypeError, "unknown key 'lrr'"),
        (TitanTrainer, {**LOSS, "optimizer": {"lr": "fast"}}, ValueError, "learning_rate must be a number, got 'fast'"),
        (TitanTrainer, {"model": "m", "loss": 3}, TypeError, "loss must be an algorithm"),
        (ReplayBuffer, {"batch_size": -1}, ValueError, "batch_size must be a whole number of at least 1, got -1"),
        (ReplayBuffer, {"batch_size": 0}, ValueError, "batch_size must be a whole number of at least 1, got 0"),
        (ReplayBuffer, {"batch_size": "4"}, ValueError, "batch_size must be .* got '4': remove the quotes"),
        (ReplayBuffer, {"batch_size": 4, "dp_size": 0}, ValueError, "dp_size must be a whole number of at least 1"),
        (
            ReplayBuffer,
            {"batch_size": 4, "max_policy_age": "1"},
            ValueError,
            "max_policy_age must be a whole number of at least 0",
        ),
        (
            ReplayBuffer,
            {"batch_size": 4, "capacity": None},
            ValueError,
            "capacity must be a whole number of at least 1, got None",
        ),
    ],
)
def test_invalid_torchforge_actor_settings_raise_before_start(component, settings, error, message):
    for start in (component.options(procs=1).as_service, component.options(procs=1).as_actor):
        with pytest.raises(error, match=message) as caught:
            start(**settings)  # not awaited, and without an event loop: nothing can have started
        assert "\n" not in str(caught.value)


def test_actor_subclass_constructor_runs_only_in_actor_process():
    constructed = []

    class Named(ReplayBuffer):
        pass

    class Constructed(ReplayBuffer):
        def __init__(self, **settings):
            constructed.append(settings)
            super().__init__(**settings)

    with pytest.raises(ValueError, match="batch_size must be a whole number"):
        Named.as_actor(batch_size=0)
    Constructed.as_actor(batch_size=0).close()
    assert not constructed


def test_compute_logprobs_matches_cross_entropy():
    logits = torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[1, 2, 3], [4, 5, 8]])
    # By cross entropy, which is another way to the same number.
    expected = -torch.nn.functional.cross_entropy(
        (logits[:, 2:5] / 0.7).flatten(0, 1), tokens.flatten(), reduction="none"
    ).view(2, 3)
    torch.testing.assert_close(compute_logprobs(logits, tokens, 0.7), expected)
    torch.testing.assert_close(compute_logprobs(logits[:, 2:5], tokens, 0.7, align=False), expected)
    assert compute_logprobs(logits.bfloat16(), tokens).dtype == torch.float32


class Recorder(ReplayBuffer):
    """Records a metric in its own process."""

    @endpoint
    async def record(self) -> None:
        record_metric("seen", 3.0, Reduce.SUM)


@pytest.mark.full
@pytest.mark.processes
async def test_torchforge_metric_logger_merges_values_of_all_processes(caplog):
    logger = await get_or_create_metric_logger(process_name="Controller")
    assert await get_or_create_metric_logger() is logger
    await logger.init_backends.call_one({"console": {"logging_mode": "global_reduce"}})
    recorder = await Recorder.as_actor(batch_size=1)
    await recorder.record.route()
    record_metric("seen", 4.0, Reduce.SUM)
    with caplog.at_level(logging.INFO, logger="forge.metrics"):
        values = await logger.flush.call_one(7)
    assert values["seen"] == 7.0
    assert "step 7" in caplog.text
    assert "seen: 7" in caplog.text
    with pytest.raises(ValueError, match="logging_mode per_rank_reduce is unsupported"):
        await logger.init_backends.call_one({"console": {"logging_mode": "per_rank_reduce"}})
    with pytest.raises(ValueError, match="the backends are console, wandb"):
        await logger.init_backends.call_one({"tensorboard": {}})
    await logger.finish.call_one()
    assert await get_or_create_metric_logger() is not logger


def test_parse_decorator_passes_resolved_config_to_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    file = tmp_path / "c.yaml"
    file.write_text("model: m\nsize: 2\ntrainer: {model: {hf_assets_path: 'hf://${model}'}, steps: '${size}', x: 1}\n")
    seen = []

    @parse
    def main(cfg) -> None:
        seen.append((cfg.trainer.model.hf_assets_path, cfg.trainer.steps, cfg.get("absent", 5), dict(**cfg.trainer)))

    monkeypatch.setattr(sys, "argv", ["program", "--config", str(file), "size=7", "~trainer.x"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code is None
    assert seen == [("m", 7, 5, {"model": {"hf_assets_path": "m"}, "steps": 7})]
    for word, message in (("trainer.y", "section.key=value"), ("~trainer.y", "has no key 'trainer.y'")):
        monkeypatch.setattr(sys, "argv", ["program", "--config", str(file), word])
        with pytest.raises(SystemExit, match=message):
            main()
