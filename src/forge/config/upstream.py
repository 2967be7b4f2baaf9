"""Configuration files of Meta's torchforge: read with their interpolations, and written with the keys of this library.

`KEYS` and `NOTES` are the two halves of the table: what a key is here, and why another has no equivalent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .yaml_files import read_yaml

Json = Any
INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
MAX_ROUNDS = 100  # substitutions in one text; a chain of names is a few long, a circle has no end

# Sections of TorchTitan, at the top of a file of SFT and within `trainer` in one of RL.
TITAN = {
    "optimizer.lr": "training.learning_rate",
    "optimizer.eps": "training.epsilon",
    "optimizer.beta1": "training.beta1",
    "optimizer.beta2": "training.beta2",
    "optimizer.weight_decay": "training.weight_decay",
    "lr_scheduler.warmup_steps": "training.warmup_steps",
    "lr_scheduler.decay_type": "training.schedule",
    "lr_scheduler.min_lr_factor": "training.min_lr_ratio",
    "training.seq_len": "training.seq_len",
    "training.max_norm": "training.max_grad_norm",
    "training.steps": "training.steps",
    "training.dtype": "training.dtype",
    "training.compile": "training.compile",
    "compile.enable": "training.compile",
    "checkpoint.interval": "checkpoint.every",
    **{
        f"parallelism.{name}_degree": f"parallelism.{name}_degree"
        for name in (
            "data_parallel_replicate",
            "data_parallel_shard",
            "tensor_parallel",
            "pipeline_parallel",
            "context_parallel",
            "expert_parallel",
        )
    },
}
PLACEMENT = ("procs", "num_replicas", "hosts", "with_gpus")
SERVICES = {
    "services.policy": "services.generator",
    "services.ref_model": "services.ref_model",
    "services.reward_actor": "services.reward",
    "actors.trainer": "services.trainer",
    "processes": "services.trainer",
}
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "bad_words")
KEYS = {
    "model": "model",
    "model_name": "model",
    "group_size": "grpo.n_samples",
    "max_req_tokens": "dataset.max_prompt_tokens",
    "max_res_tokens": "grpo.max_tokens",
    "off_by_n": "async.max_policy_age",
    "replay_buffer.max_policy_age": "async.max_policy_age",
    "replay_buffer.seed": "seed",
    "dataset.path": "dataset.path",
    # torchforge passes it to `load_dataset` as the name of a configuration: gsm8k's is "main".
    "dataset.revision": "dataset.subset",
    "dataset.data_split": "dataset.split",
    "dataset.streaming": "dataset.streaming",
    "metric_logging.wandb.project": "metrics.wandb.project",
    "metric_logging.wandb.group": "metrics.wandb.group",
    "metric_logging.wandb.name": "metrics.wandb.name",
    "metric_logging.wandb.entity": "metrics.wandb.entity",
    **{f"policy.{section}.n": "grpo.n_samples" for section in ("sampling_params", "sampling_config")},
    **{
        f"policy.{section}.{name}": f"grpo.{name}"
        for section in ("sampling_params", "sampling_config")
        for name in SAMPLING
    },
    **{f"{prefix}{name}": target for name, target in TITAN.items() for prefix in ("", "trainer.")},
    **{f"{name}.{option}": f"{target}.{option}" for name, target in SERVICES.items() for option in PLACEMENT},
}
# Why a key has no equivalent; one that ends with a dot is for all keys of a section. The longest that fits counts.
NOTES = {
    "": "no equivalent",
    "local_batch_size": "part of training.batch_size, which counts prompts",
    "batch_size": "part of training.batch_size, which counts prompts",
    "rollout_threads": "rollouts run ahead as far as async.max_policy_age",
    "training_threads": "one loop trains",
    "provisioner.": "forge launch slurm FILE, or the section cluster",
    "launcher": "forge launch slurm FILE, or the section cluster",
    "job_name": "run.name",
    "checkpoint_folder": "checkpoints are in run.root/run.name",
    "comm.": "communication has no settings here",
    "dataset.model": "the tokenizer is the model's own",
    "metric_logging.console.": "the console always has a line for each step",
    "metric_logging.wandb.": "metrics are merged over all ranks",
    "policy.": "vLLM's own arguments are keys of generator.vllm",
    "model.": "the architecture is read from the model's config.json",
    "trainer.model.": "the architecture is read from the model's config.json",
    "optimizer.": "AdamW; training.optimizer has the choices",
    "lr_scheduler.": "training.schedule and training.min_lr_ratio",
    "training.local_batch_size": "part of training.batch_size",
    "training.gc_freq": "no garbage collection by steps is needed",
    "training.dataset": "dataset.path",
    "parallelism.disable_loss_parallel": "the loss never gathers logits",
    "checkpoint.enable": "checkpoint.every: 0 writes none",
    "checkpoint.folder": "checkpoints are in run.root/run.name",
    "checkpoint.initial_load": "training starts from model",
    "checkpoint.last_save_in_hf": "the last model is always exported in Hugging Face format",
    "checkpoint.async_mode": "checkpoint.async_write",
    "activation_checkpoint.": "training.gradient_checkpointing",
    "replay_buffer.batch_size": "part of training.batch_size, which counts prompts",
    "replay_buffer.dp_size": "ranks divide a batch themselves",
    "ref_model.": "the reference is the model at its start, with the trainer's dtype and parallelism",
    "actors.dataset.": "in the controller's process; services.dataset starts one",
    "actors.replay_buffer.": "in the controller's process; services.replay_buffer starts one",
    "actors.compute_advantages.": "advantages are the algorithm's, in the controller",
    "datasets.": "dataset, and dataset.sources for several",
    "eval.": "eval has other keys, docs/configuration.md",
}
MESH = "services have the names of their sections"
# What a program of torchforge's has in its code; with the comment that says so.
PROGRAM = {
    "reward": {"functions": ["MathReward", "ThinkingReward"]},
    "dataset.target_pattern": r"####\s*(.+)",
    "dataset.chat_template": True,
    "dataset.system_prompt": "Reason between <think> and </think>, then answer between <answer> and </answer>.",
    "grpo.beta": 0.1,
}
ALPACA = "yahma/alpaca-cleaned"  # of torchforge's apps/sft/main.py


class Settings(dict[str, Json]):
    """A mapping whose keys are attributes as well, and so are those of the mappings in it."""

    def __getattr__(self, name: str) -> Json:
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(f"the configuration has no key {name!r}; it has {', '.join(self)}") from None
        return Settings(value) if isinstance(value, dict) else value


@dataclass
class Converted:
    """A configuration of this library, and what is lost.

    Attributes:
        recipe: "train" or "sft".
        values: nested, as a YAML file has them.
        notes: (key of torchforge's, its value, why it has no equivalent).
        added: keys that torchforge's program has in its code.
    """

    recipe: str
    values: dict[str, Json] = field(default_factory=dict)
    notes: list[tuple[str, Json, str]] = field(default_factory=list)
    added: list[str] = field(default_factory=list)

    def put(self, path: str, value: Json) -> None:
        """Set a key by its dotted path."""
        *sections, name = path.split(".")
        target = self.values
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = value

    def text(self, source: str) -> str:
        """The YAML file, with a comment for each key that is lost."""
        lines = [f"# {source} of torchforge. Start it: forge {self.recipe} THIS_FILE"]
        if self.added:
            lines.append(f"# From the code of torchforge's program: {', '.join(self.added)}.")
        lines += ["", yaml.safe_dump(self.values, sort_keys=False, width=110).rstrip()]
        if self.notes:
            lines += ["", "# Keys without an equivalent:"]
            lines += [f"#   {name}: {_flow(value)}  # {note}" for name, value, note in self.notes]
        return "\n".join(lines) + "\n"


def read_upstream(path: Path, overrides: Sequence[str] = ()) -> dict[str, Json]:
    """Read a file of torchforge's, its interpolations resolved and `hf://` removed from names of models.

    Args:
        overrides: `section.key=value`, set before interpolations are resolved, or `~section.key`, which is removed.

    Raises:
        ValueError: the file is malformed, an interpolation names a key or variable that does not exist, or an override
            has another form.
    """
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} must be a mapping of keys to values, got {type(values).__name__}")
    # First, as other keys may refer to them.
    for override in overrides:
        _override(values, override)
    return resolve_all(values)


def resolve_all(values: dict[str, Json]) -> dict[str, Json]:
    """Resolve `${key}`, `${sum:a,b}` and `${oc.env:NAME,default}` everywhere in nested values."""

    # Every value against the values as they were written: a name may come after its use.
    def resolved(value: Json) -> Json:
        if isinstance(value, dict):
            return {name: resolved(part) for name, part in value.items()}
        if isinstance(value, list):
            return [resolved(part) for part in value]
        return _resolve(value, values) if isinstance(value, str) else value

    resolved_values: dict[str, Json] = resolved(values)
    return resolved_values


def convert(values: Mapping[str, Json], name: str = "run") -> Converted:
    """Write a configuration of torchforge's with the keys of this library.

    Args:
        values: from `read_upstream`.
        name: of the run.
    """
    converted = Converted("train" if {"policy", "group_size"} & {*values} else "sft")
    for key, value in _leaves("", values):
        target = _place(converted.recipe, key, value)
        if target is not None:
            converted.put(*target)
        elif not _is_said(key, value, values):
            converted.notes.append((key, value, _note(key)))
    converted.put("run.name", name)
    if converted.recipe == "train":
        _finish_rl(converted, values)
    else:
        _finish_sft(converted, values)
    return converted


def trainer_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `forge.actors.Trainer` from those of torchforge's TitanTrainer; others stay as they are.

    Raises:
        ValueError: `model` is a mapping without hf_assets_path.
        TypeError: a section has a key without an equivalent.
    """
    # `optimizer` and `parallelism` are sections of `Trainer` as well, whose keys differ.
    sections = ("training", "lr_scheduler", "compile", "checkpoint", "activation_checkpoint", "comm")
    torchforge = {name: settings[name] for name in sections if isinstance(settings.get(name), Mapping)}
    arguments = {name: value for name, value in settings.items() if name not in torchforge}
    optimizer = dict(arguments.pop("optimizer", None) or {})
    renamed = {name: optimizer.pop(name) for name in ("name", "lr", "eps") if name in optimizer}
    torchforge |= {"optimizer": renamed} if renamed else {}
    model = arguments["model"]
    if isinstance(model, Mapping):
        if "hf_assets_path" not in model:
            raise ValueError(f"model needs hf_assets_path, a folder or hub id: it has {', '.join(model)}")
        arguments["model"] = str(model["hf_assets_path"]).removeprefix("hf://")
    for key, value in _leaves("", torchforge):
        target = _place("train", key, value)
        if target is None and _note(key) == NOTES[""]:
            raise TypeError(f"TitanTrainer has no setting for {key} = {value!r} (docs/howto/from_torchforge.md)")
        if target is None or target[0].startswith("checkpoint."):
            continue
        name = target[0].rpartition(".")[2]
        is_pass = name in ("seq_len", "dtype", "compile", "gradient_checkpointing")
        (arguments if is_pass else optimizer)[name] = target[1]
    if isinstance(arguments.get("parallelism"), Mapping):
        degrees = arguments["parallelism"].items()
        arguments["parallelism"] = {name: value for name, value in degrees if name != "disable_loss_parallel"}
    return arguments | {"optimizer": optimizer}


def _override(values: dict[str, Json], override: str) -> None:
    """Set or remove one key of nested values."""
    path, is_set, text = override.partition("=")
    *sections, name = path.removeprefix("~").split(".")
    target: Json = values
    for section in sections:
        target = target.setdefault(section, {}) if isinstance(target, dict) else None
    if not isinstance(target, dict) or (override.startswith("~") and name not in target):
        raise ValueError(f"{override}: the file has no key {path.removeprefix('~')!r}")
    if override.startswith("~"):
        del target[name]
    elif is_set:
        target[name] = yaml.safe_load(text)
    else:
        raise ValueError(f"an override is written as section.key=value, got {override}")


def _resolve(text: str, values: Mapping[str, Json]) -> Json:
    """A text with its interpolations, the innermost first; one that is nothing else keeps the type of its value."""
    for _ in range(MAX_ROUNDS):
        match = INTERPOLATION.search(text)
        if match is None:
            return text.removeprefix("hf://")
        value = _value_of(match[1].strip(), values)
        if match[0] == text and not isinstance(value, str):
            return value
        text = f"{text[: match.start()]}{value}{text[match.end() :]}"
    raise ValueError(f"the interpolation {text!r} refers to itself")


def _value_of(expression: str, values: Mapping[str, Json]) -> Json:
    """The value of one interpolation."""
    resolver, _, arguments = expression.partition(":")
    if resolver == "sum":
        return sum(int(number) for number in arguments.split(","))
    if resolver == "oc.env":
        variable, _, default = arguments.partition(",")
        if variable not in os.environ and not default:
            raise ValueError(f"${{{expression}}}: the environment has no {variable}: set it, or write the value")
        return os.environ.get(variable, default.strip())
    # The path of another key.
    value: Json = values
    for name in expression.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise ValueError(f"${{{expression}}} names a key that the file does not have")
        value = value[name]
    return value


def _leaves(prefix: str, values: Mapping[str, Json]) -> Iterator[tuple[str, Json]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


def _place(recipe: str, key: str, value: Json) -> tuple[str, Json] | None:
    """The key here and its value; None if there is none, or it says what is the default."""
    # Keys whose values have another form.
    titan = key.removeprefix("trainer.")
    if titan == "optimizer.name" and str(value).lower() == "adamw":
        return "training.optimizer", "adamw"
    if titan == "activation_checkpoint.mode":
        return "training.gradient_checkpointing", value != "none"
    if titan == "checkpoint.async_mode" and value != "disabled":
        return "checkpoint.async_write", True
    engine = re.fullmatch(r"policy\.engine_(?:args|config)\.(.+)", key)
    if engine is not None:
        # One process of the service is one rank of vLLM.
        placed = engine[1] in ("model", "tensor_parallel_size") or value in (None, False, 1)
        return None if placed else (f"generator.vllm.{engine[1]}", value)
    if key not in KEYS or value is None:
        return None
    target = KEYS[key]
    # The default of every degree but one; a file of ours has only what differs.
    if target.startswith("parallelism.") and value == 1:
        return None
    # Sections of a file of RL, which a file of SFT may have beside its own.
    if recipe == "sft" and target.startswith(("grpo.", "async.")):
        return None
    if target == "training.dtype" or not isinstance(value, str):
        return target, value
    return target, value.removeprefix("hf://")


def _is_said(key: str, value: Json, values: Mapping[str, Json]) -> bool:
    """Whether nothing is lost without this key: it is a default, or another one says it."""
    model = values.get("model", values.get("model_name"))
    if key.startswith(("policy.engine_args.", "policy.engine_config.")):
        return True
    if key.startswith(("parallelism.", "trainer.parallelism.")) and key.endswith("_degree") and value == 1:
        return True
    return value == model and key in ("dataset.model", "checkpoint.initial_load_path", "model.hf_assets_path")


def _note(key: str) -> str:
    if key.endswith(".mesh_name"):
        return MESH
    titan = key.removeprefix("trainer.")
    fits = [name for name in NOTES if key.startswith(name) or titan.startswith(name)]
    return NOTES[max(fits, key=len)]


def _at(values: Mapping[str, Json], path: str) -> Json:
    """The value at a dotted path; None if there is none."""
    value: Json = values
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _finish_rl(converted: Converted, values: Mapping[str, Json]) -> None:
    """The batch in prompts, the engine, and what torchforge's program has in its code."""
    # By the names of its newer files, its older ones, and its buffer.
    size = values.get("local_batch_size") or values.get("batch_size") or _at(values, "replay_buffer.batch_size")
    if size:
        # A batch there counts answers on each rank, here prompts in all.
        episodes = size * (_at(values, "replay_buffer.dp_size") or 1)
        converted.put("training.batch_size", max(1, -(-episodes // values.get("group_size", 1))))
    # Its engine is always vLLM.
    if _at(values, "policy.engine_args") or _at(values, "policy.engine_config"):
        converted.put("generator.engine", "vllm")
    # Prompt and answer have the room in the engine that they have in the trainer.
    length = _at(converted.values, "training.seq_len")
    if length:
        converted.put("generator.max_seq_len", length)
    # vLLM takes the dtype of a model's config.json, which is bfloat16 for those that torchforge names.
    if _at(converted.values, "training.dtype"):
        converted.put("generator.dtype", _at(converted.values, "training.dtype"))
    for path, value in PROGRAM.items():
        is_absent = _at(converted.values, path) is None
        if path.startswith("dataset.") and _at(values, "dataset.path") != "openai/gsm8k":
            continue
        if is_absent and (path != "grpo.beta" or _at(values, "ref_model")):
            converted.put(path, value)
            converted.added.append(path)


def _finish_sft(converted: Converted, values: Mapping[str, Json]) -> None:
    """The batch in rows over all ranks, and the rows that torchforge's program names."""
    local = _at(values, "training.local_batch_size")
    if local:
        # Ranks of tensor parallelism share their rows.
        copies = max(
            1, (_at(values, "processes.procs") or 1) // (_at(values, "parallelism.tensor_parallel_degree") or 1)
        )
        converted.put("training.batch_size", local * copies)
    if _at(converted.values, "dataset.path") is None:
        converted.put("dataset.path", ALPACA)
        converted.put("dataset.prompt_field", "instruction")
        converted.put("dataset.target_field", "output")
        converted.added.append("dataset")


def _flow(value: Json) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()
