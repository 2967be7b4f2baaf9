"""Mixtures of experts: replay of the engine's routing, the routers' loss, and the load of experts."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from forge.data.packing import pack
from forge.engines import EmbeddedEngine, EngineSettings
from forge.losses import SFTLoss
from forge.types import UNKNOWN_EXPERT, Batch, Completion, Episode, Sampling
from tests.training.cases import example, largest_difference, make_trainer, weights_of, write_model

MANY = {"num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 24}  # near ties between routes


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


def drawn(folder: Path, weights: Any = None, **settings: Any) -> list[Completion]:
    with EmbeddedEngine(folder, slots=8, **settings) as engine:
        if weights is not None:
            engine.update_weights(weights, 0).result(30)
        prompts = [[5, 9, 13, 4], [7], [20, 4, 4, 8, 11, 3, 9, 17, 5]]
        futures = [engine.submit(p, Sampling(n=8, max_tokens=40, seed=i)) for i, p in enumerate(prompts)]
        return [completion for future in futures for completion in future.result(60)]


def batch_of(completions: list[Completion]) -> Batch:
    episodes = [Episode(completion) for completion in completions]
    for episode in episodes:
        episode.advantage = 1.0
    return pack(episodes)


def gap(folder: Path, batch: Batch) -> float:
    """The mean |log ratio| of trainer and engine."""
    scores = make_trainer(folder).logprobs(batch)
    return float(np.abs(scores - batch.logprobs)[batch.mask].mean())


def test_engine_records_chosen_experts_of_each_token(mixture: Path):
    """Those of transformers' own routers, but where they were not computed."""
    plain = AutoModelForCausalLM.from_pretrained(mixture, attn_implementation="eager")
    for prefill_tokens in (4096, 3):
        for completion in drawn(mixture, router_replay=True, prefill_tokens=prefill_tokens):
            ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]])
            logits = plain(ids, output_router_logits=True).router_logits
            expected = torch.stack([layer.topk(2).indices for layer in logits], 1).numpy()
            experts, context = completion.experts, len(completion.prompt_ids) - 1
            assert experts is not None
            assert experts.shape == expected.shape == (ids.shape[1], 2, 2)
            unknown = experts == UNKNOWN_EXPERT
            assert unknown[-1].all()
            assert unknown[:context, 1].all()
            assert not unknown[:-1, 0].any()
            assert not unknown[context:-1].any()
            assert (experts == expected)[~unknown].all()
    assert drawn(mixture)[0].experts is None


@pytest.mark.full
@pytest.mark.parametrize("inexactness", ["rounding", "noise"])
def test_router_replay_removes_logprob_difference_due_to_routing(tmp_path: Path, inexactness: str):
    """To that of a dense model of the same size, whose engine is as inexact."""
    mixture = write_model(tmp_path / "mixture", "qwen3_moe", num_hidden_layers=4, **MANY)
    dense = write_model(tmp_path / "dense", "qwen3", num_hidden_layers=4)

    def inexact(folder: Path, **settings: Any) -> Batch:
        random = torch.Generator().manual_seed(1)
        weights = weights_of(make_trainer(folder))
        if inexactness == "rounding":
            # Of weights: not all CPUs have arithmetic in bfloat16, and the engine computes in float32 there.
            rounded = {name: weight.bfloat16().float() for name, weight in weights.items()}
            return batch_of(drawn(folder, rounded.items(), **settings))
        noisy = {n: w * (1 + 4e-3 * torch.randn(w.shape, generator=random)) for n, w in weights.items()}
        return batch_of(drawn(folder, noisy.items(), **settings))

    batch, of_dense = inexact(mixture, router_replay=True), gap(dense, inexact(dense))
    replayed, free = gap(mixture, batch), gap(mixture, replace(batch, experts=None))
    assert replayed < 1.2 * of_dense
    assert free > 3 * replayed


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}, {"seq_len": 50}], ids=str)
def test_router_replay_of_own_choices_does_not_change_step(mixture: Path, settings: dict[str, Any]):
    batch = batch_of(drawn(mixture, router_replay=True)[:4])
    replayed, free = make_trainer(mixture, **settings), make_trainer(mixture)
    first, second = replayed.train_step(batch, SFTLoss()), free.train_step(replace(batch, experts=None), SFTLoss())
    first.pop("micro_batches"), second.pop("micro_batches")
    assert first == pytest.approx(second, rel=1e-5, abs=1e-5)
    assert largest_difference(weights_of(replayed), weights_of(free)) < 1e-4


def test_only_replayed_experts_receive_gradients(mixture: Path):
    """The gates of others than the routers' own, by hand, and gradients for the routers and for these experts only."""
    batch, trainer = example(0, [(3, 5)]), make_trainer(mixture)
    batch.experts = np.broadcast_to(np.array([4, 1], np.uint8), (len(batch.tokens), 2, 2))
    scores = trainer.logprobs(batch)
    plain = AutoModelForCausalLM.from_pretrained(mixture, attn_implementation="eager")
    for layer in plain.model.layers:

        def route(x: torch.Tensor, gate: torch.nn.Module = layer.mlp.gate) -> tuple[torch.Tensor, ...]:
            logits = torch.nn.functional.linear(x, gate.weight)  # type: ignore[arg-type]
            gates = logits[:, [4, 1]].softmax(-1)  # of two experts that share all of the weight
            return logits, gates, torch.tensor([[4, 1]]).expand(len(x), 2)

        layer.mlp.gate.forward = route
    ids = torch.from_numpy(batch.tokens)[None]
    expected = plain(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].detach().numpy()
    np.testing.assert_allclose(scores[batch.mask], expected[batch.mask[1:]], atol=1e-5)

    before = weights_of(trainer)
    metrics = trainer.train_step(batch, SFTLoss())
    after = {name: tensor for name, tensor in weights_of(trainer).items() if tensor.dim() > 1}
    moved = {name: (tensor - before[name]).abs().flatten(1).amax(1) > 0 for name, tensor in after.items()}
    assert moved["model.layers.0.mlp.gate.weight"].any()
    assert moved["model.layers.0.mlp.experts.gate_up_proj"].tolist() == [i in (4, 1) for i in range(6)]
    assert metrics["experts/max_share_0"] == 1.0
    assert metrics["experts/entropy_1"] == pytest.approx(math.log(2))


def test_router_auxiliary_loss_and_load_match_transformers(mixture: Path):
    """Over the real tokens of a pack, of which there are no multiple of 64."""
    batch = example(0, [(3, 5), (1, 9), (6, 2)])
    plain = AutoModelForCausalLM.from_pretrained(mixture, attn_implementation="eager")
    rows = torch.from_numpy(batch.tokens).split(batch.lengths.tolist())
    by_sequence = [plain(ids[None], output_router_logits=True).router_logits for ids in rows]
    logits = tuple(torch.cat(layer) for layer in zip(*by_sequence, strict=True))
    expected = load_balancing_loss_func(logits, 6, 2)
    expected.backward()
    router = plain.model.layers[0].mlp.gate.weight.grad

    def nothing(logprobs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return 0.0 * (logprobs * weights).sum()

    def gradient(**settings: Any) -> tuple[torch.Tensor, dict[str, float]]:
        trainer = make_trainer(mixture, router_aux_loss=0.5, max_grad_norm=0.0, **settings)
        kept: list[torch.Tensor] = []
        trainer.optimizer.register_step_pre_hook(
            lambda *_: kept.append(trainer.policy.model.model.layers[0].mlp.gate.weight.grad.clone())
        )
        metrics = trainer.train_step(batch, nothing)
        return kept[0], metrics

    for checkpointed in (False, True):
        own, metrics = gradient(gradient_checkpointing=checkpointed)
        torch.testing.assert_close(own, 0.5 * router, rtol=1e-4, atol=1e-7)
        assert metrics["router_aux_loss"] == pytest.approx(expected.item(), rel=1e-5)
        assert metrics["loss"] == 0.0
        for i, layer in enumerate(logits):
            share = torch.bincount(layer.topk(2).indices.flatten(), minlength=6) / (2 * len(layer))
            assert metrics[f"experts/max_share_{i}"] == pytest.approx(2 * share.max().item())
            assert metrics[f"experts/entropy_{i}"] == pytest.approx(torch.special.entr(share).sum().item())
    assert gradient(seq_len=12)[1]["router_aux_loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_multi_turn_episode_keeps_experts_of_each_turn():
    from forge_envs.rollout import Branch

    def turn(prompt: list[int], ids: list[int], expert: int) -> Completion:
        experts = np.full((len(prompt) + len(ids), 1, 1), expert, np.uint8)
        experts[-1] = UNKNOWN_EXPERT
        return Completion("", ids, [-1.0] * len(ids), {}, tuple(prompt), [0] * len(ids), experts=experts)

    branch = Branch([5, 6])
    branch.append_turn(turn([5, 6], [7, 8], 1))
    branch.observe([9])
    branch.append_turn(turn([5, 6, 7, 8, 9], [4], 2))
    assert branch.experts is not None
    assert branch.experts[:, 0, 0].tolist() == [1, 1, 1, 2, 2, UNKNOWN_EXPERT]


def test_invalid_router_settings_raise_one_line_error(mixture: Path, model: Path, tmp_path: Path):
    with pytest.raises(
        ValueError, match="router_replay needs a mixture-of-experts model of a built-in family, got qwen3"
    ):
        EmbeddedEngine(model, router_replay=True)
    with pytest.raises(ValueError, match="router_replay is not supported by"):
        EngineSettings(engine="vllm", router_replay=True)
    with pytest.raises(ValueError, match="router_aux_loss needs a mixture-of-experts model, got qwen3"):
        make_trainer(model, router_aux_loss=0.1)
    with pytest.raises(ValueError, match=r"training\.compile does not support mixture-of-experts models"):
        make_trainer(mixture, compile=True)
    with pytest.raises(ValueError, match="olmoe models cannot be critics or reward models"):
        make_trainer(write_model(tmp_path, "olmoe"), head="value")
    batch = example()
    batch.experts = np.zeros((len(batch.tokens), 3, 2), np.uint8)
    with pytest.raises(ValueError, match="2 experts in each of 3 layers were recorded, but the model has 2 in 2"):
        make_trainer(mixture).logprobs(batch)
