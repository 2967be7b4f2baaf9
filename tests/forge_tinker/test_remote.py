"""Runs of forge whose trainer and sampler are at a server: numbers, learning, restarts, wrong settings."""

import re
import threading

import pytest
import torch
from safetensors.torch import load_file

import forge
from forge.algorithms import ALGORITHMS, SFTLoss
from forge.training.credit import make_batch
from forge.training.distributed import join_ranks
from forge.training.settings import OptimizerSettings
from forge.training.trainer import PolicyTrainer
from forge.types import Episode, Group
from forge_tinker.remote import TinkerEngine, TinkerTrainer, check_address

from .conftest import encode, serve

pytestmark = pytest.mark.processes

ROWS = [{"question": word, "answer": word[::-1]} for word in ("ab", "ba", "abc", "cab", "bca", "ca")]
SETTINGS = {
    "dataset": {"path": ROWS, "prompt_template": "{question}>"},
    "reward": lambda response: len(set(response)) / 4,
    "trainer": {"backend": "tinker"},
    "lora": {"rank": 4},
    "training": {"batch_size": 2, "steps": 4, "seq_len": 64, "learning_rate": 1e-2},
    "grpo": {"n_samples": 4, "max_tokens": 4},
    "eval": {"problems": 0},
    "async": {"max_policy_age": 0},
    "checkpoint": {"every": 2},
}


@pytest.fixture
def address(server, monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-remote")


def make_trainer(kind, model):
    optimizer = OptimizerSettings(learning_rate=1e-3, weight_decay=0.1, warmup_steps=2)
    settings = {"backend": "tinker", "base_model": model} if kind is TinkerTrainer else {}
    return kind(model, join_ranks(), optimizer, lora={"rank": 4}, seq_len=64, mini_batches=2, **settings)


def make_groups(step):
    """Groups of answers of several lengths, with the log-probabilities of another sampler."""
    groups = []
    for number, prompt in enumerate(("abc>", "hello world>")):
        answers = (encode("cba"), [*encode("dlrow"), 1], encode("z"))
        episodes = [
            Episode(
                prompt_ids=encode(prompt),
                response_ids=answer,
                reward=float(rank == step % 3),
                logprobs=[-3.0 - 0.1 * rank] * len(answer),
                versions=[step] * len(answer),
            )
            for rank, answer in enumerate(answers)
        ]
        groups.append(Group(episodes, number))
    return groups


@pytest.mark.parametrize("name", ["grpo", "gspo", "sft"])
def test_steps_at_server_equal_local_adapter(address, server, name):
    loss = SFTLoss() if name == "sft" else ALGORITHMS[name]()
    remote, local = make_trainer(TinkerTrainer, server.model), make_trainer(PolicyTrainer, server.model)
    start = dict(remote.export_weights())
    for path, parameter in local.policy.model.named_parameters():
        if path in remote._exported:
            parameter.data.copy_(remote._exported[path])
    for step in range(3):
        batch = make_batch(make_groups(step), ALGORITHMS["grpo"](), step)
        expected, metrics = local.train_step(batch, loss), remote.train_step(batch, loss)
        for metric in ("loss", "grad_norm", "ratio", "kl", "clip_fraction", "engine_difference"):
            assert metrics.get(metric) == pytest.approx(expected.get(metric), rel=1e-4, abs=1e-5), metric
        for path, tensor in dict(remote.export_weights()).items():
            trained = dict(local.export_weights())[path]
            # Where a gradient is 0 but for rounding, Adam's step is of either sign.
            assert ((tensor - trained).abs() < 1e-5).float().mean() > 0.99, path
    assert any((tensor - start[path]).abs().max() > 1e-4 for path, tensor in remote.export_weights())

    # A trainer that continues from the saved state has the optimiser's moments: its next step is the same.
    resumed = make_trainer(TinkerTrainer, server.model)
    resumed.load_state(remote.save_state())
    resumed.step = remote.step
    for trainer in (remote, resumed):
        trainer.train_step(batch, loss)
    for (path, tensor), (_, other) in zip(remote.export_weights(), resumed.export_weights(), strict=True):
        assert torch.equal(tensor, other), path


@pytest.mark.full
def test_run_with_killed_server_trains_weights_of_uninterrupted_run(base_model, tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", "tml-run")
    with serve(base_model, tmp_path / "server") as server:
        monkeypatch.setenv("TINKER_BASE_URL", server.url)
        whole = forge.train(base_model, name="whole", run={"root": str(tmp_path)}, **SETTINGS)
        assert [row["step"] for row in whole.metrics] == [0, 1, 2, 3, 4]
        for row in whole.metrics[1:]:
            assert row["train/engine_difference"] < 1e-5
            assert row["train/grad_norm"] > 0
            assert row["policy_age/max"] == 0
        weights, start = (load_file(f"{folder}/model.safetensors") for folder in (whole.model, base_model))
        assert any(not torch.equal(weights[path], start[path]) for path in start)

        def restart_server(step, metrics):
            if step == 2:
                server.kill()
                threading.Thread(target=server.start).start()

        killed = forge.train(base_model, name="killed", run={"root": str(tmp_path)}, on_step=restart_server, **SETTINGS)
        for path, tensor in load_file(f"{killed.model}/model.safetensors").items():
            assert torch.equal(tensor, weights[path]), path


def test_unserved_requests_and_addresses_raise_one_line(address, server, monkeypatch):
    with pytest.raises(ValueError, match=f"the server has no other: set one of {re.escape(server.model)}"):
        check_address("other")
    engine = TinkerEngine(server.model)
    with pytest.raises(ValueError, match="grammar: samples of a Tinker server have no such setting"):
        engine.submit([3], forge.types.Sampling(grammar="start: /a/"))
    engine.close()
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"http://127.0.0.1:9: .*refused.*set TINKER_BASE_URL"):
        check_address(server.model)
