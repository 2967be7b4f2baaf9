"""No value of a model's configuration is accepted and not computed: all fields of all families, in every recipe."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from forge.config import Arguments, to_dict
from forge.engines import EmbeddedEngine
from forge.models import FAMILIES, check_family
from forge.models.architecture import max_length
from forge.recipes.dpo import DPOConfig
from forge.recipes.launch import launch
from forge.recipes.prepare import prepare_run
from forge.recipes.resume import Start, read_config
from forge.recipes.reward_model import RewardModelConfig
from forge.recipes.rl_config import RLConfig
from forge.recipes.sft import SFTConfig
from forge.training.policy import Policy, ScalarModel
from forge_vllm.arguments import check_keys
from tests.models.config_fields import Cell, config_of, sweep
from tests.recipes.test_recipes import CONFIG
from tests.training.cases import example, make_trainer, write_classifier, write_model

# What was once accepted and not computed, and its neighbours.
SOME = [
    *((family, "sliding_window") for family in FAMILIES),
    *((family, "is_causal") for family in FAMILIES),
    *((family, "no_rope_layers") for family in ("llama", "phi3", "olmoe")),
    *((family, "layer_types") for family in ("llama", "mistral", "smollm3", "qwen3_moe")),
    *((family, "attention_bias") for family in ("mistral", "phi3", "qwen2")),
    *((family, "mlp_bias") for family in ("qwen2", "smollm3")),
    *(("gemma3_text", field) for field in ("final_logit_softcapping", "attn_logit_softcapping", "rope_scaling")),
    ("gemma3_text", "use_bidirectional_attention"),
    ("smollm3", "use_sliding_window"),
    ("phi3", "resid_pdrop"),
    ("llama", "rope_scaling"),
    ("llama", "partial_rotary_factor"),
    ("llama", "quantization_config"),
    ("olmoe", "clip_qkv"),
    ("olmoe", "moe_intermediate_size"),
    ("llama", "tie_word_embeddings"),
]


def faults(cells: list[Cell]) -> list[Cell]:
    """Those that are neither equal nor rejected; empty where transformers itself raises."""
    return [result for result in cells if not {result.trainer, result.engine} <= {"equal", "rejected", ""}]


@pytest.mark.full
@pytest.mark.parametrize(("family", "field"), SOME)
def test_each_model_config_value_is_computed_or_rejected(family: str, field: str) -> None:
    cells = list(sweep([family], [field]))
    assert faults(cells) == []
    assert any(result.trainer for result in cells)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"is_causal": False}, "bidirectional attention"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional attention"),
    ("qwen3", {"num_hidden_layers": "two"}, "config.json is invalid"),
    ("llama", {"num_attention_heads": 5}, "config.json is invalid"),
    ("phi3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "config.json is invalid"),
]


def with_values(folder: Path, family: str, **values: Any) -> Path:
    """A model whose config.json has these values as well."""
    write_model(folder, "gemma3" if family == "gemma3_text" else family)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    return folder


@pytest.mark.parametrize(("family", "values", "message"), WRONG)
def test_unsupported_model_config_field_raises_one_line_error(
    tmp_path: Path, family: str, values: dict[str, Any], message: str
) -> None:
    folder = with_values(tmp_path, family, **values)
    with pytest.raises(ValueError, match=message) as caught:
        check_family(str(folder))
    assert "\n" not in str(caught.value)
    if "invalid" not in message:
        for load in (Policy.from_pretrained, EmbeddedEngine, lambda path: ScalarModel.from_pretrained(path, "reward")):
            with pytest.raises(ValueError, match=r"not supported|no such head"):
                load(folder)


RECIPES: dict[str, tuple[type, dict[str, Any], list[str]]] = {
    "rl": (RLConfig, {}, ["--model"]),
    "rl with vLLM": (RLConfig, {}, ["--generator.engine", "vllm", "--model"]),
    "rl's reference": (RLConfig, {}, ["--model", "{good}", "--grpo.beta", "0.1", "--grpo.reference"]),
    "rl's critic": (RLConfig, {}, ["--model", "{good}", "--algorithm", "ppo", "--critic.model"]),
    "sft": (SFTConfig, {}, ["--model"]),
    "sft without answers": (SFTConfig, {}, ["--eval.accuracy", "false", "--model"]),
    "dpo": (DPOConfig, {}, ["--model"]),
    "reward_model": (RewardModelConfig, {}, ["--model"]),
    "distill's teacher": (RLConfig, {}, ["--model", "{good}", "--algorithm", "distill", "--grpo.reference"]),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_reject_unsupported_model_config_fields(
    tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("started")

    monkeypatch.setattr("forge_vllm.arguments.check_installed", lambda: None)
    good = write_model(tmp_path / "good", "qwen3")
    bad = with_values(tmp_path / "bad", "gemma3_text", use_bidirectional_attention=True)
    schema, sections, words = RECIPES[recipe]
    config = {name: CONFIG[name] for name in ("dataset", "training", "checkpoint")} | sections
    config |= {"run": {"name": "test", "root": str(tmp_path / "runs")}, "eval": {"problems": 8}}
    if schema is RLConfig:
        config["grpo"] = {"n_samples": 2, "max_tokens": 8}
    if recipe == "sft without answers":
        words = ["--eval.accuracy", "false", "--model"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config).replace("{good}", str(good)))
    words = [word.replace("{good}", str(good)) for word in words]
    with pytest.raises(SystemExit, match=r"bidirectional attention") as caught:
        launch(never, schema, ["--config", str(tmp_path / "config.yaml"), *words, str(bad)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["phi3", "llama", "gemma3", "qwen3_moe", "smollm3"])
def test_configured_dropout_is_off_when_computing_logprobs(tmp_path: Path, family: str) -> None:
    rates = {"attention_dropout": 0.5} | ({"resid_pdrop": 0.5, "embd_pdrop": 0.5} if family == "phi3" else {})
    write_model(tmp_path / "plain", family)
    write_model(tmp_path / "dropping", family, **rates)
    plain, dropping = (make_trainer(tmp_path / name) for name in ("plain", "dropping"))
    batch = example()
    assert (dropping.logprobs(batch) == plain.logprobs(batch)).all()
    assert (dropping.logprobs(batch) == dropping.logprobs(batch)).all()
    config = AutoConfig.from_pretrained(tmp_path / "dropping")
    assert {name: getattr(config, name) for name in rates} == rates


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "default", "linear", "yarn", "llama3"])
def test_rope_of_packed_sequence_ignores_length_of_neighbours(tmp_path: Path, kind: str) -> None:
    """Beyond `max_position_embeddings` the frequencies of a dynamic rope would be those of the longest in the pack."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"short_factor": [1.0, 1.5, 2.0, 1.0], "long_factor": [4.0, 3.0, 2.0, 4.0]}
    rope |= {"original_max_position_embeddings": 16} if kind in ("longrope", "llama3") else {}
    write_model(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=20)
    trainer = make_trainer(tmp_path, seq_len=200)
    alone = trainer.logprobs(example(0, [(3, 9)]))
    beside = example(0, [(3, 9), (2, 13)])
    assert trainer.logprobs(beside)[: len(alone)] == pytest.approx(alone, abs=1e-5)
    config = AutoConfig.from_pretrained(tmp_path)
    assert max_length(config) == (16 if kind == "longrope" else 20)
    beyond = example(0, [(3, 9), (2, 23)])
    if kind in ("dynamic", "longrope"):
        with pytest.raises(
            ValueError, match=rf"25 tokens is too long: this model's {kind}.* up to {max_length(config)}"
        ):
            trainer.logprobs(beyond)
    else:
        assert trainer.logprobs(beyond)[: len(alone)] == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("equal", [True, False])
def test_tied_checkpoint_with_separate_lm_head_weights_raises(tmp_path: Path, equal: bool) -> None:
    """With `tie_word_embeddings` transformers ties what is equal, and else keeps both."""
    write_model(tmp_path, "llama", tied=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + (0.0 if equal else torch.eye(29, 32))
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    if equal:
        Policy.from_pretrained(tmp_path)
        EmbeddedEngine(tmp_path).close()
        return
    for load in (Policy.from_pretrained, EmbeddedEngine):
        with pytest.raises(ValueError, match="although tie_word_embeddings is true: set it to false"):
            load(tmp_path)


LENGTHS: list[tuple[Any, list[str], int | str]] = [
    (SFTConfig, [], 64),
    (SFTConfig, ["--dataset.max_tokens", "65"], 64),
    (SFTConfig, ["--dataset.max_tokens", "50"], 50),
    (SFTConfig, ["--training.seq_len", "40"], 40),
    (DPOConfig, [], 64),
    (DPOConfig, ["--dataset.max_tokens", "100"], 64),
    (RewardModelConfig, ["--dataset.max_tokens", "128"], 64),
    (RLConfig, [], 56),  # 8 are for the completion
    (RLConfig, ["--dataset.max_prompt_tokens", "64"], "is more than the 56 tokens that grpo.max_tokens = 8 leaves"),
    (RLConfig, ["--generator.max_seq_len", "20"], 12),
    (RLConfig, ["--generator.max_seq_len", "65"], "max_seq_len must be 2 to 64 for this model"),
    (RLConfig, ["--grpo.beta", "1", "--grpo.reference", "{short}"], "takes 32 tokens, and sequences may have 64: set"),
    (RLConfig, ["--algorithm", "ppo", "--critic.model", "{short}"], "takes 32 tokens, and sequences may have 64: set"),
]


@pytest.mark.parametrize(("schema", "words", "most"), LENGTHS)
def test_packed_row_length_is_capped_at_model_length(
    tmp_path: Path, schema: Any, words: list[str], most: int | str
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("started")

    model = write_model(tmp_path / "model", "qwen3")
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    write_classifier(tmp_path / "short", max_position_embeddings=32, rope_parameters=rope)
    config: dict[str, Any] = {"training": {"seq_len": 256, "steps": 1, "batch_size": 2}, "eval": {"problems": 0}}
    config |= {"run": {"name": "test", "root": str(tmp_path / "runs")}, "model": str(model)}
    rows = [{"question": "ab" * n, "answer": "ba", "chosen": "ab" * n, "rejected": "b"} for n in (3, 31, 40, 100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config["dataset"] = {"path": str(tmp_path / "rows.jsonl")}
    if schema is RLConfig:
        config["grpo"] = {"n_samples": 2, "max_tokens": 8}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    words = [word.replace("{short}", str(tmp_path / "short")) for word in words]
    argv = ["--config", str(tmp_path / "config.yaml"), *words]
    if isinstance(most, str):
        with pytest.raises(SystemExit, match=most):
            launch(never, schema, argv)
        return
    cfg = read_config(schema, Arguments.parse(argv))
    before = to_dict(cfg)
    prepare_run(cfg, Start())[-1].close()
    rows_config = cfg.data(str(model))
    assert getattr(rows_config, "max_prompt_tokens" if schema is RLConfig else "max_tokens") == most
    assert to_dict(cfg) == before  # what a resumed run is compared with


@pytest.mark.parametrize(
    ("family", "values", "stray"),
    [
        ("llama", {"logit_scale": 0.5}, "logit_scale"),
        ("llama", {"sliding_window": 8}, "sliding_window"),
        ("olmo2", {"sliding_window": 8}, "sliding_window"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"qkv_bias": True}, "qkv_bias"),
        ("qwen3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"attention_bias": True, "mlp_bias": True}, None),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True}, None),
        ("llama", {"logit_scale": 1.0, "sliding_window": None}, None),
        ("phi3", {"partial_rotary_factor": 0.5}, None),
    ],
)
def test_model_config_keys_supported_only_by_vllm_raise(family: str, values: dict[str, Any], stray: str | None) -> None:
    config = config_of(family, **values)
    if stray is None:
        check_keys(config)
        return
    with pytest.raises(ValueError, match=rf"^config\.json has {stray}, which vLLM uses"):
        check_keys(config)


def test_models_unsupported_by_vllm_raise() -> None:
    with pytest.raises(ValueError, match="does not support tie_word_embeddings"):
        check_keys(config_of("olmoe", tie_word_embeddings=True))
    check_keys(config_of("olmoe", tie_word_embeddings=False))
    windows = {"sliding_window": 8, "use_sliding_window": True, "num_hidden_layers": 2}
    with pytest.raises(ValueError, match="support a sliding window in only some layers"):
        check_keys(config_of("qwen3", max_window_layers=1, **windows))
    check_keys(config_of("qwen3", max_window_layers=0, **windows))
