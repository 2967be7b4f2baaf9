"""Read configuration files of Meta's torchforge with their interpolations, and convert them to keys of this library.

`forge_compat.torchforge_keys` has the table of keys.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from forge.config.arguments import check_whole
from forge.config.sections import flatten_config
from forge.config.yaml_files import read_yaml
from forge.system.files import escape_controls

from .torchforge_keys import ALPACA, ENGINE, ENGINE_KEYS, KEYS, MESH, NOTES, PROGRAM, RECOMPUTED

Json = Any
INTERPOLATION = re.compile(r"(?<!\\)\$\{([^${}]*)\}")
MAX_ROUNDS = 100  # substitutions in one text: more are a key that refers to itself


def resolve_all(values: dict[str, Json]) -> dict[str, Json]:
    r"""Return nested values with the interpolations resolved in all texts, and without `hf://` at their starts.

    `${key}` is the value of another key, `${oc.env:NAME,default}` the value of an environment variable, and `\${key}`
    the text `${key}`.

    Raises:
        ValueError: an interpolation names a key or variable that does not exist, refers to itself, or adds up texts.

    >>> resolve_all({"model": "hf://Qwen/Qwen3-1.7B", "trainer": {"path": "${model}"}})
    {'model': 'Qwen/Qwen3-1.7B', 'trainer': {'path': 'Qwen/Qwen3-1.7B'}}
    """

    # Every interpolation looks into the original values, as a key may stand after its use.
    def resolve_value(value: Json) -> Json:
        if isinstance(value, dict):
            return {name: resolve_value(part) for name, part in value.items()}
        if isinstance(value, list):
            return [resolve_value(part) for part in value]
        return _resolve_text(value, values) if isinstance(value, str) else value

    return {name: resolve_value(part) for name, part in values.items()}


def _resolve_text(text: str, values: Mapping[str, Json]) -> Json:
    """Return a text with its interpolations resolved, or the value itself if the text is one interpolation only."""
    # The expression finds the innermost interpolation first.
    for _ in range(MAX_ROUNDS):
        match = INTERPOLATION.search(text)
        if match is None:
            return text.replace(r"\${", "${").removeprefix("hf://")
        value = _value_of(match[1].strip(), values)
        if match[0] == text and not isinstance(value, str):
            return value
        text = f"{text[: match.start()]}{value}{text[match.end() :]}"
    raise ValueError(f"the interpolation {text!r} refers to itself")


def _value_of(expression: str, values: Mapping[str, Json]) -> Json:
    """Return the value of one interpolation, `expression` in `${expression}`."""
    resolver, _, arguments = expression.partition(":")
    if resolver == "sum":
        return sum(int(number) for number in arguments.split(","))
    if resolver == "oc.env":
        variable, has_default, default = arguments.partition(",")
        if variable not in os.environ and not has_default:
            raise ValueError(f"${{{expression}}}: the environment has no {variable}: set it, or write the value")
        return os.environ.get(variable, yaml.safe_load(default))
    # The path of another key.
    value: Json = values
    for name in expression.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise ValueError(f"${{{expression}}} names a key that the file does not have")
        value = value[name]
    return value


class Settings(dict[str, Json]):
    """A dict whose keys are attributes as well, also in the dicts inside it."""

    def __getattr__(self, name: str) -> Json:
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(f"the configuration has no key {name!r}; it has {', '.join(self)}") from None
        return Settings(value) if isinstance(value, dict) else value


@dataclass
class Converted:
    """A configuration converted from torchforge's.

    Attributes:
        recipe: "train" or "sft".
        values: the configuration, nested as in a YAML file.
        notes: for each key of torchforge without an equivalent: the key, its value, and the reason.
        added: keys with values that torchforge's program has in its code.
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
        """Return the YAML file, with a comment for each key without an equivalent; `source` names the original."""
        lines = [f"# {escape_controls(source)} of torchforge. Start it: forge {self.recipe} THIS_FILE"]
        if self.added:
            lines.append(f"# From the code of torchforge's program: {', '.join(self.added)}.")
        lines += ["", yaml.safe_dump(self.values, sort_keys=False, width=110).rstrip()]
        if self.notes:
            lines += ["", "# Keys without an equivalent:"]
            lines += [f"#   {escape_controls(name)}: {_as_flow(value)}  # {note}" for name, value, note in self.notes]
        return "\n".join(lines) + "\n"


def read_upstream(path: Path, overrides: Sequence[str] = ()) -> dict[str, Json]:
    """Return the values in a configuration file of torchforge, with interpolations resolved as by `resolve_all`.

    Args:
        overrides: "section.key=value" sets a key before interpolations are resolved, "~section.key" removes one.

    Raises:
        ValueError: the file is malformed, an interpolation cannot be resolved, or an override has another form.
    """
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} must be a mapping of keys to values, got {type(values).__name__}")
    # Before interpolations are resolved, as these may refer to overridden keys.
    for override in overrides:
        key, is_set, text = override.removeprefix("~").partition("=")
        *sections, name = key.split(".")
        target: Json = values
        for section in sections:
            target = target.setdefault(section, {})
        if is_set:
            target[name] = yaml.safe_load(text)
        elif not override.startswith("~"):
            raise ValueError(f"an override is written as section.key=value, got {override}")
        elif target.pop(name, None) is None:
            raise ValueError(f"{override}: the file has no key {key!r}")
    return resolve_all(values)


def convert_config(values: Mapping[str, Json], name: str = "run") -> Converted:
    """Convert a configuration of torchforge to the keys of this library.

    Args:
        values: as `read_upstream` returns them.
        name: of the run.

    Raises:
        ValueError: a number that is needed is invalid, a value is missing (`???`), or contradicts another key; the
            message names the key. Or the file is one of this library.
    """
    if {"grpo", "run"} & {*values}:
        raise ValueError("the file is a forge configuration already: start it with forge train, sft or dpo")
    converted = Converted("train" if {"policy", "group_size"} & {*values} else "sft")
    for key, value in flatten_config({**values}).items():
        if value == "???":
            raise ValueError(f"{key} has no value (???): set it")
        target = _engine_argument(key, value, values) or place_key(converted.recipe, key, value)
        if target is None:
            if not _is_redundant(key, value, values):
                converted.notes.append((key, value, note_key(key)))
            continue
        converted.put(*target)

    for key in ("checkpoint.enable", "trainer.checkpoint.enable"):
        is_enabled = _value_at(values, key)
        if is_enabled not in (None, True, False):
            raise ValueError(f"{key} must be true or false, got {is_enabled!r:.80}")
        if is_enabled is False:
            converted.put("checkpoint.every", 0)
    converted.put("run.name", name)
    if converted.recipe == "train":
        _finish_rl(converted, values)
    else:
        _finish_sft(converted, values)

    return converted


def place_key(recipe: str, key: str, value: Json) -> tuple[str, Json] | None:
    """Return the equivalent here of one of torchforge's keys, with its value; None if there is none or it is a default.

    Args:
        recipe: "train" or "sft".

    >>> place_key("train", "group_size", 8)
    ('grpo.n_samples', 8)
    """
    # Keys whose values have another form here.
    titan = key.removeprefix("trainer.")
    if titan == "optimizer.name" and str(value).lower() == "adamw":
        return "training.optimizer", "adamw"
    if titan == "activation_checkpoint.mode":
        if str(value).lower() not in RECOMPUTED:
            raise ValueError(f"{key} must be one of {', '.join(RECOMPUTED)}, got {value!r:.80}")
        return "training.gradient_checkpointing", RECOMPUTED[str(value).lower()]
    if titan == "checkpoint.async_mode" and str(value).startswith("async"):
        return "checkpoint.async_write", True
    if key not in KEYS or value is None:
        return None
    target = KEYS[key]
    # The file has only what differs from defaults, and 1 is that of degrees of parallelism. torchforge's files for SFT
    # may also have keys for RL.
    is_default = target.startswith("parallelism.") and value == 1
    if is_default or (recipe == "sft" and target.startswith(("grpo.", "async."))):
        return None
    if target == "training.dtype" or not isinstance(value, str):
        return target, value
    return target, value.removeprefix("hf://")


def _engine_argument(key: str, value: Json, values: Mapping[str, Json]) -> tuple[str, Json] | None:
    """Return the equivalent here of an argument of vLLM, with its value.

    None if the key is no such argument, or the value is the default or follows from another key.
    """
    engine = ENGINE.fullmatch(key)
    procs = _value_at(values, "services.policy.procs")  # one process of the service is one rank of vLLM
    # "auto" is the dtype of the model's config.json, which is the default.
    implied = {
        "model": _read_model(values),
        "tensor_parallel_size": procs or 1,
        "pipeline_parallel_size": 1,
        "dtype": "auto",
    }
    if engine is None or value is None or implied.get(engine[1]) == value:
        return None
    return f"generator.{ENGINE_KEYS.get(engine[1], f'vllm.{engine[1]}')}", value


def _read_model(values: Mapping[str, Json]) -> str | None:
    """Return the name of the model in a file, or None: in files for SFT, `model` is a section."""
    return next((values[name] for name in ("model", "model_name") if isinstance(values.get(name), str)), None)


def _is_redundant(key: str, value: Json, values: Mapping[str, Json]) -> bool:
    """Return whether nothing is lost without this key: its value is a default, or follows from another key."""
    titan = key.removeprefix("trainer.")
    return (
        ENGINE.fullmatch(key) is not None  # `_engine_argument` keeps all others
        or (titan == "checkpoint.enable" and value is False)
        or (titan.startswith("parallelism.") and titan.endswith("_degree") and value == 1)
        or (
            key in ("dataset.model", "checkpoint.initial_load_path", "model.hf_assets_path")
            and value == _read_model(values)
        )
    )


def note_key(key: str) -> str:
    """Return the reason why a key has no equivalent: the note in `NOTES` with the longest prefix that fits."""
    if key.endswith(".mesh_name"):
        return MESH
    titan = key.removeprefix("trainer.")
    return NOTES[max([name for name in NOTES if key.startswith(name) or titan.startswith(name)], key=len)]


def _value_at(values: Mapping[str, Json], path: str) -> Json:
    """Return the value at a dotted path; None if there is none."""
    value: Json = values
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _finish_rl(converted: Converted, values: Mapping[str, Json]) -> None:
    """Complete a configuration for RL: the batch size, the engine, and what torchforge's program has in its code."""
    # The batch size has one name in newer files, one in older ones, and one in the buffer's section.
    sizes = ("local_batch_size", "batch_size", "replay_buffer.batch_size")
    key = next((name for name in sizes if _value_at(values, name) is not None), None)
    group = values.get("group_size")
    if group is not None or (key and "group_size" in values):
        group = check_whole(group, "group_size")
    for section in ("sampling_params", "sampling_config"):
        samples = _value_at(values, f"policy.{section}.n")
        if None not in (group, samples) and group != samples:
            raise ValueError(
                f"policy.{section}.n = {samples} differs from group_size = {group}: set both to the same number"
            )
        group = group or samples
    if key:
        # In torchforge the batch size is the number of answers on each rank, here the number of prompts of all ranks.
        episodes = check_whole(_value_at(values, key), key)
        # Number of ranks with a separate batch; -1 for those that the other degrees of parallelism leave.
        parts = _value_at(values, "replay_buffer.dp_size")
        if parts == -1:
            others = ("data_parallel_replicate", "tensor_parallel", "pipeline_parallel", "context_parallel")
            episodes *= _remaining_ranks(
                values, "replay_buffer.dp_size = -1", "actors.trainer.procs", "trainer.parallelism", others
            )
        elif parts is not None:
            episodes *= check_whole(parts, "replay_buffer.dp_size")
        converted.put("training.batch_size", max(1, -(-episodes // (group or 1))))  # rounded up

    # torchforge's engine is always vLLM.
    if _value_at(values, "policy.engine_args") or _value_at(values, "policy.engine_config"):
        converted.put("generator.engine", "vllm")

    # Sequences may be as long in the engine as in the trainer.
    length = _value_at(converted.values, "training.seq_len")
    if length and _value_at(converted.values, "generator.max_seq_len") is None:
        converted.put("generator.max_seq_len", length)
    # vLLM takes the dtype of a model's config.json, which is bfloat16 for those that torchforge names.
    if _value_at(converted.values, "training.dtype") and _value_at(converted.values, "generator.dtype") is None:
        converted.put("generator.dtype", _value_at(converted.values, "training.dtype"))
    for path, value in PROGRAM.items():
        is_absent = _value_at(converted.values, path) is None
        if path.startswith("dataset.") and _value_at(values, "dataset.path") != "openai/gsm8k":
            continue
        if is_absent and (path != "grpo.beta" or _value_at(values, "ref_model")):
            converted.put(path, value)
            converted.added.append(path)


def _remaining_ranks(
    values: Mapping[str, Json], subject: str, procs_key: str, section: str, kinds: Sequence[str]
) -> int:
    """Return the number of ranks divided by the product of the given degrees of parallelism.

    Args:
        subject: names in errors what needs this number.
        procs_key: the key of the number of all ranks; without a value, it is the product.
        section: of the degrees.
        kinds: names of the degrees, such as "tensor_parallel".

    Raises:
        ValueError: the product does not divide the number of ranks.
    """
    degrees = [f"{section}.{kind}_degree" for kind in kinds]
    product = math.prod(
        check_whole(_value_at(values, name), name) for name in degrees if _value_at(values, name) is not None
    )
    procs = _value_at(values, procs_key)
    ranks = product if procs is None else check_whole(procs, procs_key)
    if ranks % product:
        raise ValueError(
            f"{subject}: the other degrees of {section} make {product}, which does not divide {procs_key} = {ranks}"
        )
    return ranks // product


def _finish_sft(converted: Converted, values: Mapping[str, Json]) -> None:
    """Complete a configuration for SFT: the batch size of all ranks, and the data that torchforge's program has in its
    code."""
    local = _value_at(values, "training.local_batch_size")
    if local is not None:
        # Ranks of tensor, pipeline and context parallelism have the same rows.
        copies = _remaining_ranks(
            values,
            "training.local_batch_size",
            "processes.procs",
            "parallelism",
            ("tensor_parallel", "pipeline_parallel", "context_parallel"),
        )
        converted.put("training.batch_size", check_whole(local, "training.local_batch_size") * copies)
    if _value_at(converted.values, "dataset.path") is None:
        converted.put("dataset.path", ALPACA)
        converted.put("dataset.prompt_field", "instruction")
        converted.put("dataset.target_field", "output")
        converted.added.append("dataset")


def _as_flow(value: Json) -> str:
    # YAML on one line; breaks of lines in texts become spaces.
    return " ".join(yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").split())
