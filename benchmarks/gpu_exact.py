"""Parts of `gpu.py` that compare numbers: with transformers, with themselves, before and after a move."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from gpu_setup import Row, Setup, build, engine_cases, forget_memory, generated, prompts, synchronize, trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from forge.data.packing import pack
from forge.engines import load_engine
from forge.losses import GRPOLoss
from forge.training import checkpoint
from forge.training.build import precision_context
from forge.training.trainer import PolicyTrainer
from forge.types import Batch, Episode

# Name, class and configuration of small models with the shapes of attention that published models have.
COMMON: dict[str, Any] = {"vocab_size": 512, "num_hidden_layers": 2, "tie_word_embeddings": False}
FAMILIES: dict[str, tuple[str, type, Callable[[], Any]]] = {
    "qwen2": (
        "Qwen2, 7 heads a key, 64",
        Qwen2ForCausalLM,
        lambda: Qwen2Config(
            **COMMON, hidden_size=896, intermediate_size=512, num_attention_heads=14, num_key_value_heads=2
        ),
    ),
    "qwen3": (
        "Qwen3, heads of 128",
        Qwen3ForCausalLM,
        lambda: Qwen3Config(
            **COMMON,
            hidden_size=256,
            intermediate_size=512,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=128,
        ),
    ),
    "gemma3": (
        "Gemma 3, heads of 256, window 96",
        Gemma3ForCausalLM,
        lambda: Gemma3TextConfig(
            **COMMON,
            hidden_size=256,
            intermediate_size=512,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=256,
            sliding_window=96,
            query_pre_attn_scalar=256,
            layer_types=["sliding_attention", "full_attention"],
            pad_token_id=0,
        ),
    ),
}


def tree_batch(vocab: int, seed: int, groups: int = 3, samples: int = 3, longest: int = 200) -> Batch:
    """Samples of a few prompts with random lengths, so that runs share prefixes."""
    random = np.random.default_rng(seed)
    episodes = []
    for _ in range(groups):
        prompt = random.integers(5, vocab, int(random.integers(2, longest))).tolist()
        for _ in range(samples):
            response = random.integers(5, vocab, int(random.integers(1, longest))).tolist()
            episodes.append(Episode(prompt_ids=prompt, response_ids=response, reward=0.0, advantage=1.0))
    return pack(episodes)


def scores(model: Any, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of a batch's trained tokens by transformers, one sequence at a time."""
    logprobs, entropies, start = [], [], 0
    for length in batch.lengths.tolist():
        ids = torch.from_numpy(batch.tokens[start : start + length]).to(device)
        mask = torch.from_numpy(batch.mask[start + 1 : start + length]).to(device)
        logp = model(ids[None]).logits[0, :-1].float().log_softmax(-1)
        logprobs.append(logp.gather(1, ids[1:, None])[:, 0][mask])
        entropies.append(-(logp.exp() * logp).sum(-1)[mask])
        start += length
    return torch.cat(logprobs), torch.cat(entropies)


def objective(logprobs: Tensor, entropies: Tensor) -> Tensor:
    """A loss whose gradient differs by token."""
    factors = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(1)).to(logprobs.device)
    return (logprobs * factors).mean() + 0.1 * (entropies * factors.flip(0)).mean()


def distance(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The largest relative distance of a parameter's gradient, |ours - exact| / |exact|."""
    return max(float((ours[name].float() - grad).norm() / grad.norm()) for name, grad in exact.items())


def gradients(family: str, setup: Setup) -> Iterator[Row]:
    """Log-probabilities and every parameter's gradient of packed trees, against transformers' eager float32. In
    bfloat16 the limit is half more than what transformers' own bfloat16 is away from it."""
    device, folder = setup.device, setup.folder / family
    torch.backends.cuda.matmul.allow_tf32 = False
    name, kind, config = FAMILIES[family]
    build(folder, config(), kind)
    batch = tree_batch(COMMON["vocab_size"], seed=len(family))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").to(device)

    def peer(half: bool) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            logprobs, entropies = scores(model, batch, device)
        objective(logprobs, entropies).backward()
        return logprobs.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    exact, rounded = peer(False), peer(setup.on_gpu)
    for dtype in ("float32", "bfloat16") if setup.on_gpu else ("float32",):
        policy = trainer(folder, dtype)
        start = time.perf_counter()
        with precision_context(policy.ranks, policy.dtype):
            found = policy.policy(batch)
        objective(found.logprobs, found.entropy).backward()
        synchronize(setup)
        seconds = time.perf_counter() - start
        ours = {name: whole(p.grad) for name, p in policy.policy.named_weights()}
        what = f"{name}, {dtype}"
        apart = float((found.logprobs.detach() - exact[0]).abs().mean())
        most = 1e-5 if dtype == "float32" else 1.5 * float((rounded[0] - exact[0]).abs().mean())
        yield Row.at_most(f"{what}: log-probabilities from float32, mean", apart, most)
        most = 1e-3 if dtype == "float32" else 1.5 * distance(rounded[1], exact[1])
        yield Row.at_most(f"{what}: furthest gradient, relative", distance(ours, exact[1]), most)
        yield Row(f"{what}: first forward and backward", f"{seconds:.1f} s")


def whole(gradient: Tensor) -> Tensor:
    """The tensor of a part of it, of one rank."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@torch.no_grad()
def reference(model: Any, batch: Batch) -> np.ndarray:
    """Log-probabilities of a batch's trained tokens by a model of transformers."""
    return scores(model, batch, model.device)[0].cpu().numpy()


def compare(what: str, engine: Any, setup: Setup, exact: Any, rounded: Any) -> Iterator[Row]:
    """How far an engine's sampled tokens are from transformers in float32; the limit is half more than how far
    transformers is in the engine's dtype."""
    drawn = generated(engine, prompts(8, 32, setup.shape["vocab_size"]), 64)
    batch = pack([Episode(completion, 0.0, advantage=1.0) for completion in drawn])
    truth = reference(exact, batch)
    most = max(1.5 * float(np.abs(reference(rounded, batch) - truth).mean()), 1e-5)
    apart = float(np.abs(np.concatenate([completion.logprobs for completion in drawn]) - truth).mean())
    yield Row.at_most(f"{what}: log-probabilities from float32, mean", apart, most)


def correctness(setup: Setup) -> Iterator[Row]:
    """Each engine and the trainer against transformers."""
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(setup.model, dtype=dtype).to(setup.device).eval()
        for dtype in (torch.float32, getattr(torch, setup.dtype))
    )
    for name, kind, settings in engine_cases(setup):
        engine = load_engine(kind, setup.model, slots=8, max_seq_len=256, dtype=setup.dtype, **settings)
        try:
            yield from compare(name, engine, setup, exact, rounded)
        finally:
            engine.close()
    batch = tree_batch(setup.shape["vocab_size"], 0)
    truth = reference(exact, batch)
    most = max(1.5 * float(np.abs(reference(rounded, batch) - truth).mean()), 1e-5)
    apart = float(np.abs(trainer(setup.model, setup.dtype).logprobs(batch)[batch.mask] - truth).mean())
    yield Row.at_most("trainer: log-probabilities from float32, mean", apart, most)


def repeat(setup: Setup) -> Iterator[Row]:
    """The same two steps from the same weights: bits, and the distance where they differ."""
    batch = tree_batch(setup.shape["vocab_size"], 0)
    logprobs = []
    for _ in range(2):
        policy = trainer(setup.model, setup.dtype)
        for _ in range(2):
            policy.train_step(batch, GRPOLoss())
        logprobs.append(policy.logprobs(batch)[batch.mask])
    apart = float(np.abs(logprobs[0] - logprobs[1]).max())
    yield Row("two steps, twice: largest difference of log-probabilities", "none" if apart == 0 else f"{apart:.1e}")


def moves(setup: Setup) -> Iterator[Row]:
    """Checkpoint and resume, offload and onload, release and restore: bits, seconds, and memory that stays."""
    batch = tree_batch(setup.shape["vocab_size"], 0)
    policy = trainer(setup.model, setup.dtype)
    policy.train_step(batch, GRPOLoss())

    def state(of: PolicyTrainer) -> list[Tensor]:
        parameters = [whole(parameter.detach()).cpu() for parameter in of.policy.parameters()]
        moments = [whole(v).cpu() for s in of.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        return parameters + moments

    def equal(a: list[Tensor], b: list[Tensor]) -> bool:
        return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    before = state(policy)
    start = time.perf_counter()
    path = checkpoint.save_checkpoint(policy, setup.folder / "checkpoints")
    middle = time.perf_counter()
    other = trainer(setup.model, setup.dtype)
    loading = time.perf_counter()
    checkpoint.load_checkpoint(other, path)
    seconds = f"{middle - start:.1f} s, {time.perf_counter() - loading:.1f} s"
    yield Row("checkpoint: write, read", seconds, "the same bits", equal(before, state(other)))
    del other
    forget_memory(setup)
    start = time.perf_counter()
    policy.offload()
    middle = time.perf_counter()
    left = torch.accelerator.memory_allocated() / 2**20 if setup.real else 0.0
    policy.onload()
    synchronize(setup)
    seconds = f"{middle - start:.2f} s, {time.perf_counter() - middle:.2f} s"
    yield Row("trainer: offload, onload", seconds, "the same bits", equal(before, state(policy)))
    # Workspaces of cuBLAS, 32 MiB on Hopper for each thread that multiplied, are no tensors of the trainer.
    yield Row.at_most("trainer: memory that offload leaves", left, 128, ".0f", " MiB")
    policy.offload()
    weights = [(name, tensor.to("cpu", copy=True)) for name, tensor in policy.export_weights()]
    engine = load_engine("embedded", setup.model, slots=8, max_seq_len=256, dtype=setup.dtype)
    contexts = prompts(8, 32, setup.shape["vocab_size"])
    try:
        engine.update_weights(iter(weights), 1).result(timeout=600)
        drawn = [completion.token_ids for completion in generated(engine, contexts, 16)]
        start = time.perf_counter()
        engine.release().result(timeout=600)
        middle = time.perf_counter()
        left = torch.accelerator.memory_allocated() / 2**20 if setup.real else 0.0
        engine.restore().result(timeout=600)
        engine.update_weights(iter(weights), 2).result(timeout=600)
        seconds = f"{middle - start:.2f} s, {time.perf_counter() - middle:.2f} s"
        again = [completion.token_ids for completion in generated(engine, contexts, 16)]
    finally:
        engine.close()
    yield Row("embedded: release, restore with weights", seconds, "the same tokens", drawn == again)
    yield Row.at_most("embedded: memory that release leaves", left, 128, ".0f", " MiB")
