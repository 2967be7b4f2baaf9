"""Files of Meta's torchforge are printed with the keys of this library; each other key has a comment."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from forge.cli import main
from forge.config import read
from forge.config.sections import flatten_config
from forge.recipes.rl_config import RLConfig
from forge.recipes.sft import SFTConfig
from forge_compat.torchforge_files import Settings, convert_config, read_upstream
from forge_compat.torchforge_keys import KEYS, NOTES
from tests.forge_compat.test_setting_names import has_key

DEGREES = {
    "data_parallel_replicate_degree": 1,
    "data_parallel_shard_degree": 1,
    "tensor_parallel_degree": 1,
    "pipeline_parallel_degree": 1,
    "context_parallel_degree": 1,
    "expert_parallel_degree": 1,
}
CHECKPOINT = {"enable": True, "initial_load_path": "hf://${model}", "initial_load_in_hf": True}
PLACED = {"procs": 1, "with_gpus": False}


def grpo(model: str, group_size: int, batch: int, tensor_parallel: int, trainers: int) -> dict[str, Any]:
    """Keys and values of apps/grpo/qwen3_1_7b.yaml and qwen3_32b.yaml."""
    return {
        "group_size": group_size,
        "local_batch_size": batch,
        "max_req_tokens": 1024,
        "max_res_tokens": 1024,
        "model": model,
        "off_by_n": 1,
        "rollout_threads": 1,
        "metric_logging": {
            "wandb": {"project": "grpo-training", "group": "grpo_exp_${oc.env:USER}", "logging_mode": "global_reduce"},
            "console": {"logging_mode": "global_reduce"},
        },
        "dataset": {
            "path": "openai/gsm8k",
            "revision": "main",
            "data_split": "train",
            "streaming": True,
            "model": "${model}",
        },
        "policy": {
            "engine_args": {
                "model": "${model}",
                "tensor_parallel_size": tensor_parallel,
                "pipeline_parallel_size": 1,
                "enforce_eager": False,
            },
            "sampling_params": {
                "n": "${group_size}",
                "max_tokens": "${max_res_tokens}",
                "temperature": 1.0,
                "top_p": 1.0,
            },
        },
        "trainer": {
            "model": {"name": "qwen3", "flavor": "1.7B", "hf_assets_path": "hf://${model}"},
            "optimizer": {"name": "AdamW", "lr": 1e-5, "eps": 1e-8},
            "lr_scheduler": {"warmup_steps": 1},
            "training": {
                "local_batch_size": "${local_batch_size}",
                "seq_len": "${sum:${max_req_tokens},${max_res_tokens}}",
                "max_norm": 1.0,
                "steps": 1000000,
                "dtype": "bfloat16",
                "gc_freq": 1,
            },
            "compile": {"enable": False},
            "parallelism": DEGREES | {"tensor_parallel_degree": trainers, "disable_loss_parallel": True},
            "checkpoint": CHECKPOINT
            | {"folder": "./checkpoint", "last_save_in_hf": True, "interval": 500, "async_mode": "disabled"},
            "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
        },
        "replay_buffer": {
            "batch_size": "${local_batch_size}",
            "max_policy_age": "${off_by_n}",
            "dp_size": "${trainer.parallelism.data_parallel_shard_degree}",
        },
        "ref_model": {
            "model": {"name": "qwen3", "flavor": "1.7B", "hf_assets_path": "hf://${model}"},
            "training": {"seq_len": "${trainer.training.seq_len}", "dtype": "bfloat16", "gc_freq": 1},
            "compile": {"enable": False},
            "parallelism": DEGREES,
            "checkpoint": CHECKPOINT,
        },
        "services": {
            "policy": {
                "procs": "${policy.engine_args.tensor_parallel_size}",
                "num_replicas": 1,
                "mesh_name": "policy",
                "with_gpus": True,
            },
            "ref_model": PLACED | {"num_replicas": 1, "mesh_name": "ref_model", "with_gpus": True},
            "reward_actor": PLACED | {"num_replicas": 1, "mesh_name": "reward_actor"},
        },
        "actors": {
            "dataset": PLACED | {"mesh_name": "dataset"},
            "trainer": {"procs": trainers, "with_gpus": True, "mesh_name": "trainer"},
            "replay_buffer": PLACED | {"mesh_name": "replay_buffer"},
            "compute_advantages": PLACED | {"mesh_name": "compute_advantages"},
        },
    }


# Keys and values of apps/sft/llama3_8b.yaml.
SFT = {
    "comm": {"trace_buf_size": 0},
    "model_name": "meta-llama/Meta-Llama-3.1-8B-Instruct",
    "model": {"name": "llama3", "flavor": "8B", "hf_assets_path": "hf://${model_name}"},
    "processes": {"procs": 8, "with_gpus": True},
    "optimizer": {"name": "AdamW", "lr": 1e-5, "eps": 1e-8},
    "lr_scheduler": {"warmup_steps": 200},
    "training": {
        "local_batch_size": 1,
        "seq_len": 2048,
        "max_norm": 1.0,
        "steps": 1000,
        "compile": False,
        "dataset": "c4",
    },
    "parallelism": DEGREES | {"data_parallel_shard_degree": -1, "disable_loss_parallel": False},
    "checkpoint": {
        "enable": True,
        "folder": "./checkpoint",
        "initial_load_path": "hf://${model_name}",
        "interval": 500,
        "async_mode": "async",
    },
    "activation_checkpoint": {"mode": "none"},
    "metric_logging": {"wandb": {"project": "sft-training", "logging_mode": "global_reduce"}},
}
SMALL = grpo("Qwen/Qwen3-1.7B", 8, 16, 1, 1)
LARGE = grpo("Qwen/Qwen3-32B", 16, 32, 4, 8) | {"provisioner": {"launcher": "slurm"}}


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "ada")


def written(folder: Path, values: dict[str, Any], name: str = "qwen3.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.processes
def test_torchforge_grpo_config_converts_with_equal_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main(["convert", "upstream", str(written(tmp_path, SMALL))])
    printed = capsys.readouterr().out
    ours = tmp_path / "ours.yaml"
    ours.write_text(printed)
    # vLLM is not installed here; the embedded engine takes the same keys.
    config = read(RLConfig, ours, [("generator.engine", "embedded"), ("generator.vllm", "{}")])
    assert config.model == "Qwen/Qwen3-1.7B"
    assert (config.grpo.n_samples, config.grpo.max_tokens, config.grpo.settings()["beta"]) == (8, 1024, 0.1)
    # 16 answers of groups of 8.
    assert config.training.batch_size == 2
    assert (config.training.learning_rate, config.training.seq_len, config.training.steps) == (1e-5, 2048, 1000000)
    assert config.training.gradient_checkpointing
    assert (config.dataset.path, config.dataset.subset, config.dataset.split) == ("openai/gsm8k", "main", "train")
    assert (config.async_.max_policy_age, config.checkpoint.every) == (1, 500)
    assert config.metrics.wandb is not None
    assert config.metrics.wandb.group == "grpo_exp_ada"
    assert config.services.ref_model is not None
    assert config.services.ref_model.with_gpus
    assert config.run.name == "qwen3"
    generator = yaml.safe_load(printed)["generator"]
    assert (generator["engine"], generator["vllm"]) == ("vllm", {"enforce_eager": False})


@pytest.mark.parametrize("values", [SMALL, LARGE, SFT], ids=["small", "large", "sft"])
def test_torchforge_config_keys_are_converted_or_commented(tmp_path: Path, values: dict[str, Any]):
    resolved = read_upstream(written(tmp_path, values))
    converted = convert_config(resolved)
    text = converted.text("qwen3.yaml")
    for path in [leaf for name, part in converted.values.items() for leaf in flatten_config({name: part})]:
        assert has_key(path) or path.startswith(("services.", "generator.vllm.")), path
    noted = {name for name, _, _ in converted.notes}
    for key in [leaf for name, part in resolved.items() for leaf in flatten_config({name: part})]:
        is_converted = key in KEYS or key.removeprefix("trainer.") in ("optimizer.name", "activation_checkpoint.mode")
        # What another key says already, such as the model of the tokenizer.
        is_said = key.startswith(("policy.engine_args.", "dataset.model", "model.hf_assets_path")) or key.endswith(
            ("initial_load_path", "async_mode")
        )
        assert is_converted or is_said or key in noted, key
        if key in noted:
            assert f"#   {key}: " in text
    assert not any(note == NOTES[""] for _, _, note in converted.notes)


def test_torchforge_sft_config_converts_with_equal_values(tmp_path: Path):
    converted = convert_config(read_upstream(written(tmp_path, SFT)), "llama")
    ours = tmp_path / "ours.yaml"
    ours.write_text(converted.text("llama3_8b.yaml"))
    config = read(SFTConfig, ours)
    assert config.training.batch_size == 8  # one row on each of 8 ranks
    assert config.services.trainer.procs == 8
    assert not config.training.gradient_checkpointing
    assert config.checkpoint.async_write
    assert config.parallelism.data_parallel_shard_degree == -1
    assert config.dataset.path == "yahma/alpaca-cleaned"


def test_unknown_torchforge_key_is_noted_without_equivalent():
    converted = convert_config({"group_size": 2, "unheard": {"of": 3}})
    assert converted.notes == [("unheard.of", 3, "no equivalent")]
    assert "#   unheard.of: 3  # no equivalent" in converted.text("x.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: ${b}", r"\$\{b\} names a key that the file does not have"),
        ("a: ${b}\nb: ${a}", "refers to itself"),
        ("a: ${oc.env:NEVER_SET_BY_ANY}", "the environment has no NEVER_SET_BY_ANY"),
        ("[1, 2]", "must be a mapping of keys to values, got list"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_unreadable_torchforge_files_raise_one_line_error(tmp_path: Path, text: str, message: str):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_upstream(file)
    assert "\n" not in str(caught.value)


def test_torchforge_config_interpolations_keep_types(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("n: 3\nflag: true\na: {b: '${n}', c: 'x${n}', d: ['${flag}'], e: '${oc.env:NEVER_SET, z}'}\n")
    values = Settings(read_upstream(file))
    assert values.a == {"b": 3, "c": "x3", "d": [True], "e": "z"}
    with pytest.raises(AttributeError, match="has no key 'absent'; it has n, flag, a"):
        values.absent  # noqa: B018


def test_converted_vllm_arguments_yield_to_explicit_keys():
    engine = {
        "model": "a/b",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "trust_remote_code": True,
        "max_num_batched_tokens": 1,
        "seed": 0,
        "gpu_memory_utilization": 1.0,
        "quantization": None,
    }
    kept = {
        name: value
        for name, value in engine.items()
        if name not in ("model", "tensor_parallel_size", "pipeline_parallel_size", "quantization")
    }
    for name in ("engine_args", "engine_config"):
        values = convert_config({"model": "a/b", "policy": {name: engine}}).values
        assert repr(values["generator"]["vllm"]) == repr(kept)  # True is not 1
    general = {"max_num_seqs": 4, "max_model_len": 512, "dtype": "float32"}
    file = {"model": "a/b", "trainer": {"training": {"seq_len": 256, "dtype": "bfloat16"}}, "policy": {}}
    file["policy"] = {"engine_args": general}
    assert convert_config(file).values["generator"] == {
        "slots": 4,
        "max_seq_len": 512,
        "dtype": "float32",
        "engine": "vllm",
    }
    file["policy"] = {"engine_args": {"dtype": "auto", "seed": 0}}
    assert convert_config(file).values["generator"] == {
        "vllm": {"seed": 0},
        "engine": "vllm",
        "max_seq_len": 256,
        "dtype": "bfloat16",
    }
    placed = {"model": "a/b", "services": {"policy": {"procs": 4}}}
    differing = {"model": "c/d", "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert convert_config(placed | {"policy": {"engine_args": differing}}).values["generator"]["vllm"] == differing


RL = {"group_size": 8, "local_batch_size": 16}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            RL | {"local_batch_size": "16"},
            "local_batch_size must be a whole number of at least 1, got '16': remove the",
        ),
        (RL | {"local_batch_size": 16.0}, r"local_batch_size must be a whole number of at least 1, got 16\.0"),
        (RL | {"local_batch_size": True}, "local_batch_size must be a whole number of at least 1, got True"),
        (RL | {"local_batch_size": 0}, "local_batch_size must be a whole number of at least 1, got 0"),
        (RL | {"group_size": None}, "group_size must be a whole number of at least 1, got None"),
        (RL | {"group_size": "8"}, "group_size must be a whole number of at least 1, got '8'"),
        (RL | {"group_size": [8]}, r"group_size must be a whole number of at least 1, got \[8\]"),
        (RL | {"group_size": {"of": 8}}, "group_size must be a whole number of at least 1, got {'of': 8}"),
        (RL | {"group_size": 0}, "group_size must be a whole number of at least 1, got 0"),
        ({"group_size": "8"}, "group_size must be a whole number of at least 1, got '8'"),
        (RL | {"group_size": "???"}, r"group_size has no value \(\?\?\?\): set it"),
        (
            RL | {"policy": {"sampling_params": {"n": 3}}},
            "policy.sampling_params.n = 3 differs from group_size = 8: set both",
        ),
        (RL | {"replay_buffer": {"dp_size": 0}}, "replay_buffer.dp_size must be a whole number of at least 1, got 0"),
        (RL | {"replay_buffer": {"dp_size": "x"}}, "replay_buffer.dp_size must be a whole number"),
        (
            RL | {"trainer": {"checkpoint": {"enable": "no"}}},
            "trainer.checkpoint.enable must be true or false, got 'no'",
        ),
        (
            RL | {"trainer": {"activation_checkpoint": {"mode": 1}}},
            "mode must be one of none, selective, full, .* got 1",
        ),
        (SFT | {"processes": {"procs": "x"}}, "processes.procs must be a whole number of at least 1, got 'x'"),
        (SFT | {"training": {"local_batch_size": "1"}}, "training.local_batch_size must be a whole number"),
        (SFT | {"parallelism": {"tensor_parallel_degree": 0}}, "parallelism.tensor_parallel_degree must be a whole"),
        (
            {"model": "m", "grpo": {"n_samples": 8}},
            "the file is a forge configuration already: start it with forge train",
        ),
    ],
)
def test_invalid_torchforge_value_errors_name_the_key(tmp_path: Path, values: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message) as caught:
        convert_config(read_upstream(written(tmp_path, values)))
    assert "\n" not in str(caught.value)


def test_torchforge_checkpoint_and_activation_settings_are_converted():
    def converted(**sections: Any) -> dict[str, Any]:
        return convert_config(RL | {"trainer": sections}).values

    assert converted(checkpoint={"enable": False, "interval": 500})["checkpoint"] == {"every": 0}
    assert converted(checkpoint={"interval": 500, "enable": False})["checkpoint"] == {"every": 0}
    assert convert_config({"checkpoint": {"enable": False}}).values["checkpoint"] == {"every": 0}
    assert converted(checkpoint={"enable": True, "interval": 500})["checkpoint"] == {"every": 500}
    for mode in (None, "disabled"):
        assert "checkpoint" not in converted(checkpoint={"async_mode": mode})
    assert converted(checkpoint={"async_mode": "async_with_pinned_mem"})["checkpoint"] == {"async_write": True}
    for mode, is_on in ((None, False), ("none", False), ("full", True)):
        assert converted(activation_checkpoint={"mode": mode})["training"]["gradient_checkpointing"] is is_on
