"""Runs of a few steps with a tiny model, in this process, as `forge mismatch` finds them: for `mismatch.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from forge.algorithms import load_algorithm
from forge.engines.engine import EmbeddedEngine
from forge.models.tokenizer import character_tokenizer
from forge.models.weight_layouts import split_experts
from forge.observability.rollouts import ROLLOUTS, RolloutLog
from forge.training import checkpoint, credit
from forge.training.distributed import Ranks
from forge.training.policy import Policy
from forge.training.settings import OptimizerSettings
from forge.training.step import score
from forge.training.trainer import PolicyTrainer
from forge.types import Completion, Episode, Group, Sampling

STEPS = 3
GROUPS, SAMPLES = 3, 4
LETTERS = "abcdefghijklmnopqrstuvwxyz <>/"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen2": (Qwen2Config, {}),
    "llama": (LlamaConfig, {"rope_parameters": LOCAL | {"rope_theta": 500000.0}}),
    "mistral": (MistralConfig, {"sliding_window": 8}),
    "qwen3_moe": (Qwen3MoeConfig, {"head_dim": 16, "norm_topk_prob": True} | EXPERTS),
    "olmoe": (OlmoeConfig, {"num_experts": 8, "num_experts_per_tok": 3, "pad_token_id": None}),
    "gemma3": (
        Gemma3TextConfig,
        {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 6, "sliding_window_pattern": 2}
        | {"rope_parameters": {"sliding_attention": LOCAL, "full_attention": LOCAL | {"rope_theta": 1e6}}},
    ),
}
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Setup:
    """The run of a case.

    sizes: of the model's config. settings: keys of the configuration that differ from a plain run.
    """

    family: str = "qwen3"
    tied: bool = False
    seed: int = 0
    chat: bool = False
    bos: bool = True
    sizes: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def unchanged(value: Any, *_: Any) -> Any:
    """What a case without a fault does."""
    return value


@dataclass(frozen=True)
class Fault:
    """One fault, and what has to be said of it.

    component, cause: words that the verdict must have. layer: the number that it must have; None: any.
    publish: (weights of each version) -> those that the engine gets. prompt: tokens -> those that the engine reads.
    sampling: changes the request. record: changes the recorded log-probabilities of an episode. engine_config: changes
    config.json of the engine. always, recording: contexts with other code, for the whole case or while it is recorded.
    saved: changes the run's folder afterwards. reference: (the start, the current weights) -> those of the reference.
    """

    component: str
    cause: str
    layer: int | None = None
    setup: Setup = Setup()
    publish: Callable[[list[Tensors], Setup], Tensors] = lambda versions, setup: versions[-1]
    prompt: Callable[[list[int], str, Any], list[int]] = unchanged
    sampling: Callable[[Sampling], Sampling] = unchanged
    record: Callable[[Episode], None] = unchanged
    engine_config: Callable[[dict[str, Any]], None] = unchanged
    always: Callable[[], AbstractContextManager[Any]] = nullcontext
    recording: Callable[[], AbstractContextManager[Any]] = nullcontext
    saved: Callable[[Path], None] = unchanged
    reference: Callable[[Tensors, Tensors], Tensors] = unchanged


CLEAN = Fault("", "")


def small_model(folder: Path, setup: Setup) -> Path:
    """Write a model whose distributions are far from uniform, with a tokenizer of single characters."""
    words = character_tokenizer(LETTERS)
    if setup.bos:
        words.add_special_tokens({"bos_token": "<bos>"})
    if setup.chat:
        words.chat_template = TEMPLATE
    kind, extra = FAMILIES[setup.family]
    sizes = {
        "vocab_size": len(words),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": setup.tied,
        "eos_token_id": None,
        "bos_token_id": words.bos_token_id,
    }
    torch.manual_seed(setup.seed)
    model = AutoModelForCausalLM.from_config(kind(**sizes | extra | setup.sizes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.25) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def record_run(root: Path, setup: Setup, fault: Fault = CLEAN) -> Path:
    """Record a run of `STEPS` steps, with a checkpoint after each; returns its folder."""
    model = small_model(root / "start", setup)
    settings = {"grpo.temperature": 1.0, "generator.on_update": "finish", **setup.settings}
    folder = root / "run"
    folder.mkdir()
    config = nested({**settings, "model": str(model), "training.steps": STEPS, "training.batch_size": GROUPS})
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [{"step": float(step)} for step in range(1, STEPS + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with fault.recording():
        _train(folder, model, setup, settings, fault)
    fault.saved(folder)
    return folder


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Settings by dotted names as sections."""
    sections: dict[str, Any] = {}
    for name, value in flat.items():
        *path, key = name.split(".")
        section = sections
        for part in path:
            section = section.setdefault(part, {})
        section[key] = value
    return sections


def _train(folder: Path, model: Path, setup: Setup, settings: dict[str, Any], fault: Fault) -> None:
    temperature = settings["grpo.temperature"]
    lora = {key.removeprefix("lora."): value for key, value in settings.items() if key.startswith("lora.")}
    trainer = PolicyTrainer(
        model,
        Ranks(0, 1, torch.device("cpu"), None),
        OptimizerSettings(learning_rate=0.1 if lora else 0.02, max_grad_norm=0),
        lora=lora or None,
        temperature=temperature,
        seq_len=4096,
        mini_batches=settings.get("training.mini_batches", 1),
    )
    algorithm = load_algorithm("grpo")
    words = trainer_words(model)
    frozen = Policy.from_pretrained(model)
    start = dict(clones(trainer))
    versions = [dict(split_experts(clones(trainer)))]
    log = RolloutLog(folder / ROLLOUTS, lambda data: append(folder / ROLLOUTS, data), "all")
    random = np.random.default_rng(setup.seed)
    bounds = {name: settings[f"grpo.{name}"] for name in ("top_p", "top_k") if f"grpo.{name}" in settings}
    policy = {"logprobs_of": "policy"} if bounds else {}
    request = Sampling(n=SAMPLES, max_tokens=10, temperature=temperature, **bounds, **policy)
    texts = ["".join(random.choice(list(LETTERS[:20]), 40 - 3 * number)) for number in range(GROUPS)]
    with EmbeddedEngine(engine_folder(model, fault), device="cpu", slots=16, max_seq_len=128) as engine:
        engine.update_weights(fault.publish(versions, setup).items(), 0).result()
        for step in range(1, STEPS + 1):
            groups = []
            for number, text in enumerate(texts):
                ids = prompt_ids(text, words, setup)
                sampling = fault.sampling(replace(request, seed=100 * step + number))
                completions = engine.submit(fault.prompt(ids, text, words), sampling).result()
                episodes = [episode_of(ids, completion, random) for completion in completions]
                for episode in episodes:
                    fault.record(episode)
                groups.append(Group(episodes, GROUPS * (step - 1) + number, "", text))
            batch = credit.make_batch(groups, algorithm, step - 1, groups)
            if any(name.startswith("services.ref_model.") for name in settings):
                frozen.model.load_state_dict(fault.reference(start, dict(clones(trainer))), strict=False)
                batch.ref_logprobs = score(lambda part: frozen(part, temperature)[0], batch, max_tokens=4096)
            trainer.train_step(batch, algorithm)
            log.add(step, groups, batch, trainer.recorded)
            checkpoint.save(trainer, folder / "checkpoints", keep=None)
            versions.append(dict(split_experts(clones(trainer))))
            engine.update_weights(fault.publish(versions, setup).items(), step).result()
    checkpoint.export(trainer, folder / "model", model)


def append(path: Path, data: bytes) -> None:
    """Append bytes to a file."""
    with path.open("ab") as file:
        file.write(data)


def clones(trainer: PolicyTrainer) -> Iterator[tuple[str, torch.Tensor]]:
    """The trainer's weights as they are now."""
    return ((name, tensor.detach().clone()) for name, tensor in trainer.export_weights())


def trainer_words(model: Path) -> Any:
    """The tokenizer of a model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def prompt_ids(text: str, words: Any, setup: Setup) -> list[int]:
    """The tokens of a prompt as the run writes them."""
    if setup.chat:
        text = words.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    ids = list(words(text).input_ids)
    return [words.bos_token_id, *ids] if setup.bos else ids


def episode_of(ids: list[int], completion: Completion, random: np.random.Generator) -> Episode:
    """A completion as an episode over the recorded prompt, with a reward by chance."""
    return Episode(
        prompt_ids=ids,
        response_ids=completion.token_ids,
        logprobs=completion.logprobs,
        versions=completion.versions,
        reward=float(random.random()),
    )


def engine_folder(model: Path, fault: Fault) -> Path:
    """The folder that the engine reads, with its own config.json."""
    config = json.loads((model / "config.json").read_text())
    before = json.dumps(config)
    fault.engine_config(config)
    if json.dumps(config) == before:
        return model
    folder = model.with_name("engine")
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(config))
    if config["tie_word_embeddings"] != json.loads(before)["tie_word_embeddings"]:
        shared = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        shared.config.tie_word_embeddings = config["tie_word_embeddings"]
        shared.lm_head.weight = torch.nn.Parameter(shared.lm_head.weight.detach().clone())
        shared.save_pretrained(folder)
    return folder
