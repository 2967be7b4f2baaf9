"""Faults that `mismatch.py` puts into engine, trainer, weights and recorded rollouts from outside."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp

import forge.engines.decoder
import forge.engines.weights
import forge.training.policy
from benchmarks.mismatch_runs import Fault, Setup, Tensors
from forge.engines.batch import RunningBatch
from forge.engines.linear import Linear
from forge.system.checksums import CHECKSUMS, write_checksums
from forge.training.checkpoint_reader import Planner, Reader
from forge.types import Episode


def stale_shard(versions: list[Tensors], _: Setup) -> Tensors:
    """The second half of the rows of one matrix stays as it was at the first publication."""
    name = "model.layers.1.mlp.down_proj.weight"
    mixed = versions[-1][name].clone()
    mixed[len(mixed) // 2 :] = versions[0][name][len(mixed) // 2 :]
    return {**versions[-1], name: mixed}


def stale_columns(versions: list[Tensors], _: Setup) -> Tensors:
    """A quarter of the columns of one matrix is a version behind."""
    name = "model.layers.0.self_attn.v_proj.weight"
    mixed = versions[-1][name].clone()
    mixed[:, 8:16] = versions[max(len(versions) - 2, 0)][name][:, 8:16]
    return {**versions[-1], name: mixed}


def stale_head(versions: list[Tensors], _: Setup) -> Tensors:
    """The head stays as it was at the first publication."""
    return {**versions[-1], "lm_head.weight": versions[0]["lm_head.weight"]}


def swapped_far(versions: list[Tensors], _: Setup) -> Tensors:
    """Layers 0 and 2 change places on the way."""
    places = {"model.layers.0.": "model.layers.2.", "model.layers.2.": "model.layers.0."}
    return {places.get(name[:15], name[:15]) + name[15:]: tensor for name, tensor in versions[-1].items()}


def stale_all(versions: list[Tensors], _: Setup) -> Tensors:
    """The engine never gets new weights, as if it slept through publications."""
    return versions[0]


def swapped(versions: list[Tensors], _: Setup) -> Tensors:
    """Layers 1 and 2 change places on the way."""
    places = {"model.layers.1.": "model.layers.2.", "model.layers.2.": "model.layers.1."}
    return {places.get(name[:15], name[:15]) + name[15:]: tensor for name, tensor in versions[-1].items()}


def unscaled_adapters(versions: list[Tensors], setup: Setup) -> Tensors:
    """Adapters are merged without alpha / rank."""
    scale = setup.settings["lora.alpha"] / setup.settings["lora.rank"]
    return {name: versions[0][name] + (new - versions[0][name]) / scale for name, new in versions[-1].items()}


def untied_head(versions: list[Tensors], _: Setup) -> Tensors:
    """The head stays as it was, where the embedding is updated."""
    return {**versions[-1], "lm_head.weight": versions[0]["model.embed_tokens.weight"]}


def tied_to_embedding(versions: list[Tensors], _: Setup) -> Tensors:
    """The engine takes the embedding for the head."""
    return {**versions[-1], "lm_head.weight": versions[-1]["model.embed_tokens.weight"]}


def rounded(versions: list[Tensors], _: Setup) -> Tensors:
    """Weights are published in bfloat16, and computed with in float32."""
    return {name: tensor.bfloat16().float() for name, tensor in versions[-1].items()}


def shift_record(episode: Episode) -> None:
    """The log-probabilities begin one token late."""
    start = episode.mask.index(True)
    assert episode.logprobs is not None
    episode.logprobs[start:] = [*episode.logprobs[start + 1 :], episode.logprobs[-1]]


def shift_back(episode: Episode) -> None:
    """The log-probabilities begin one token early."""
    start = episode.mask.index(True)
    assert episode.logprobs is not None
    episode.logprobs[start:] = [episode.logprobs[start], *episode.logprobs[start:-1]]


def divide_record(episode: Episode) -> None:
    """Log-probabilities of temperature 1, not logits, are divided by the temperature."""
    assert episode.logprobs is not None
    episode.logprobs = [value / 0.7 for value in episode.logprobs]


def other_base(config: dict[str, Any]) -> None:
    """The engine reads a config.json that has lost the rotary base."""
    config["rope_parameters"]["rope_theta"] = 10000.0


def untie(config: dict[str, Any]) -> None:
    """The engine reads a config.json that does not tie the head."""
    config["tie_word_embeddings"] = False


def other_window(config: dict[str, Any]) -> None:
    """The engine reads a config.json without the sliding window."""
    config["sliding_window"] = None


def other_gates(config: dict[str, Any]) -> None:
    """The engine reads a config.json whose experts' gates are not normalised."""
    config["norm_topk_prob"] = False


@contextmanager
def kept_cache() -> Iterator[None]:
    """An update of the weights does not empty the prefix cache."""

    def drop(self: RunningBatch, waiting: Any) -> None:
        self._prefilling = (None, 0)

    with mock.patch.object(RunningBatch, "_drop_prefixes", drop):
        yield


class Rounded:
    """A product of the engine that adds in bfloat16."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product, rounded."""
        return self.linear(x).bfloat16().float()


@contextmanager
def filled_weights(change: Callable[[Any], None]) -> Iterator[None]:
    """The engine's weights, with a change after they are filled."""
    fill = forge.engines.weights.Weights.__init__

    def filled(self: Any, *args: Any, **kwargs: Any) -> None:
        fill(self, *args, **kwargs)
        change(self)

    with mock.patch.object(forge.engines.weights.Weights, "__init__", filled):
        yield


def bfloat16_sums() -> AbstractContextManager[None]:
    """The down projection of layer 1 adds in bfloat16."""

    def change(weights: Any) -> None:
        weights.layers[1].feed_forward.down = Rounded(weights.layers[1].feed_forward.down)

    return filled_weights(change)


def bfloat16_output() -> AbstractContextManager[None]:
    """The output projection of layer 2 adds in bfloat16."""

    def change(weights: Any) -> None:
        weights.layers[2].output = Rounded(weights.layers[2].output)

    return filled_weights(change)


@contextmanager
def bfloat16_engine() -> Iterator[None]:
    """Every product of the engine is rounded to bfloat16, and the run says float32."""
    product = Linear.__call__

    def wrong(self: Linear, x: torch.Tensor) -> torch.Tensor:
        return product(self, x).bfloat16().float()

    with mock.patch.object(Linear, "__call__", wrong):
        yield


@contextmanager
def engine_base() -> Iterator[None]:
    """The engine's tables of rotary embeddings have another base."""
    tables = forge.engines.decoder.rotary_tables

    def wrong(config: Any, *args: Any) -> Any:
        import copy

        config = copy.deepcopy(config)
        config.rope_parameters["rope_theta"] = 1000.0
        return tables(config, *args)

    with mock.patch.object(forge.engines.decoder, "rotary_tables", wrong):
        yield


@contextmanager
def unscaled_embedding() -> Iterator[None]:
    """The engine does not scale Gemma's embedding."""
    build = forge.engines.decoder.Decoder.__init__

    def wrong(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.embed_scale = None

    with mock.patch.object(forge.engines.decoder.Decoder, "__init__", wrong):
        yield


@contextmanager
def damaged_keys() -> Iterator[None]:
    """Keys that a decoding step leaves in the cache are a tenth smaller than they should be."""
    decode = forge.engines.decoder.Decoder.decode

    def wrong(self: Any, tokens: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
        logits = decode(self, tokens, positions, length)
        for row, position in enumerate(positions.tolist()):
            self.cache.keys[:, row, :, position] *= 0.9
        return logits

    with mock.patch.object(forge.engines.decoder.Decoder, "decode", wrong):
        yield


@contextmanager
def engine_heads() -> Iterator[None]:
    """The engine deals queries to the wrong group of keys."""
    order = forge.engines.weights.by_group

    def wrong(heads: torch.Tensor, config: Any) -> torch.Tensor:
        H, K = config.num_attention_heads, config.num_key_value_heads
        dealt = heads[:H].unflatten(0, (-1, K)).transpose(0, 1).flatten(0, 1)
        return order(torch.cat([dealt, heads[H:]]), config)

    with mock.patch.object(forge.engines.weights, "by_group", wrong):
        yield


@contextmanager
def trainer_temperature() -> Iterator[None]:
    """The trainer scores at temperature 1."""
    scores = forge.training.policy.token_logprobs

    def wrong(*args: Any, temperature: float, **kwargs: Any) -> Any:
        return scores(*args, temperature=1.0, **kwargs)

    with mock.patch.object(forge.training.policy, "token_logprobs", wrong):
        yield


@contextmanager
def trainer_mask() -> Iterator[None]:
    """The trainer reads the state of the token itself, not of the one before."""
    tokens = forge.training.policy.rank_tokens

    def wrong(batch: Any, lag: int, ranks: Any) -> Any:
        return tokens(batch, lag - 1, ranks)

    with mock.patch.object(forge.training.policy, "rank_tokens", wrong):
        yield


@contextmanager
def leaking_pack() -> Iterator[None]:
    """Sequences of a pack see those before them."""
    layout = forge.training.policy.PackedLayout.of

    def wrong(lengths: list[int], device: Any = "cpu", parents: list[int] | None = None) -> Any:
        return layout([sum(lengths)], device, [-1])

    with mock.patch.object(forge.training.policy.PackedLayout, "of", wrong):
        yield


def swapped_export(folder: Path) -> None:
    """Two layers of the exported model have changed places."""
    from safetensors.torch import load_file, save_file

    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    names = {
        f"model.layers.{a}.mlp.up_proj.weight": f"model.layers.{b}.mlp.up_proj.weight" for a, b in ((0, 1), (1, 0))
    }
    save_file({name: tensors[names.get(name, name)] for name in tensors}, file, {"format": "pt"})


def swapped_checkpoint(folder: Path) -> None:
    """The first two layers of a checkpoint have changed places, as if resharding had mixed them up."""
    step = folder / "checkpoints" / "step_000002"
    stored = Reader(step).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if hasattr(entry, "size")
    }
    dcp.load(state, storage_reader=Reader(step), planner=Planner())
    first, second = (f"model.model.model.layers.{layer}." for layer in (0, 1))
    places = {first: second, second: first}
    size = len(first)
    mixed = {name: state[places.get(name[:size], name[:size]) + name[size:]] for name in state}
    for file in (step / ".metadata", *step.glob("__*")):
        file.unlink()
    dcp.save(mixed, checkpoint_id=step)
    write_checksums(step, [path.name for path in step.iterdir() if path.name != CHECKSUMS])


def lost_scaling(folder: Path) -> None:
    """The exported config.json has lost the scaling of the rotary embedding."""
    file = folder / "model" / "config.json"
    config = json.loads(file.read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    file.write_text(json.dumps(config))


LORA = {"lora.rank": 4, "lora.alpha": 16.0}
ENGINE, FORWARD = "the engine as it sampled", "the engine's forward pass"
TRAINER = "the trainer's forward pass"
YARN = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}}
FAULTS: dict[str, Fault] = {
    "stale_shard": Fault(ENGINE, "rows 16 to 31 of model.layers.1.mlp.down_proj", 1, publish=stale_shard),
    "rotary_base": Fault(ENGINE, "the rotary base was 10000", setup=Setup("llama"), engine_config=other_base),
    "temperature": Fault(
        ENGINE,
        "temperature was not applied",
        setup=Setup(settings={"grpo.temperature": 0.7}),
        sampling=lambda sampling: replace(sampling, temperature=1.0),
    ),
    "top_p": Fault(
        ENGINE,
        "renormalised over what top_p",
        setup=Setup(settings={"grpo.top_p": 0.9}),
        sampling=lambda sampling: replace(sampling, logprobs_of="drawn"),
    ),
    "bfloat16_sums": Fault(FORWARD, "bfloat16", 1, always=bfloat16_sums),
    "dropped_bos": Fault(ENGINE, "BOS", prompt=lambda ids, text, words: ids[1:]),
    "swapped_layers": Fault(ENGINE, "layers 1 and 2 have changed places", 1, publish=swapped),
    "mask": Fault(ENGINE, "off by one", record=shift_record),
    "kept_cache": Fault(ENGINE, "a cache was kept over a weight update", recording=kept_cache),
    "lora_scale": Fault(
        ENGINE, "alpha / rank = 4 was not applied", setup=Setup(settings=LORA), publish=unscaled_adapters
    ),
    "tied_head": Fault(
        ENGINE,
        "the head was not tied",
        setup=Setup("qwen2", tied=True),
        publish=untied_head,
        engine_config=untie,
    ),
    "template": Fault(
        ENGINE,
        "without the chat template",
        setup=Setup(chat=True, bos=False),
        prompt=lambda ids, text, words: list(words(text).input_ids),
    ),
    # Further kinds, from reports about trainers and engines that disagree.
    "stale_weights": Fault(ENGINE, "all weights were those of version 0", publish=stale_all),
    "published_rounded": Fault(ENGINE, "weights were rounded to bfloat16", publish=rounded),
    "head_tied": Fault(ENGINE, "the head was tied to the embedding", setup=Setup("llama"), publish=tied_to_embedding),
    "engine_base": Fault(FORWARD, "the rotary base was 1000,", 0, always=engine_base),
    "engine_heads": Fault(FORWARD, "attention", 0, always=engine_heads),
    "window": Fault(ENGINE, "the sliding window was not applied", setup=Setup("mistral"), engine_config=other_window),
    "gates": Fault(ENGINE, "the gates of experts", setup=Setup("qwen3_moe"), engine_config=other_gates),
    "trainer_temperature": Fault(
        TRAINER,
        "temperature was not applied",
        setup=Setup(settings={"grpo.temperature": 0.7}),
        always=trainer_temperature,
    ),
    "trainer_mask": Fault(TRAINER, "off by one", always=trainer_mask),
    "moving_reference": Fault(
        "the reference model",
        "all weights were those of version 2 in place of 0",
        setup=Setup(settings={"services.ref_model.procs": 1}),
        reference=lambda start, current: current,
    ),
    "swapped_checkpoint": Fault("the saved weights", "layers 0 and 1 have changed places", 0, saved=swapped_checkpoint),
    "bfloat16_engine": Fault(ENGINE, "products were rounded to bfloat16", recording=bfloat16_engine),
    "divided_after_softmax": Fault(
        ENGINE,
        "divided the log-probabilities after the softmax",
        setup=Setup(settings={"grpo.temperature": 0.7}),
        sampling=lambda sampling: replace(sampling, temperature=1.0),
        record=divide_record,
    ),
    "embedding_scale": Fault(
        FORWARD, "the embedding was not scaled", setup=Setup("gemma3", tied=True), always=unscaled_embedding
    ),
    "decoded_keys": Fault("the engine's cache", "layer 0, attention", 0, always=damaged_keys),
    "leaking_pack": Fault("the trainer's packing", "layer 0, attention", 0, always=leaking_pack),
    "swapped_export": Fault("the saved model", "model.layers.0.mlp.up_proj.weight", saved=swapped_export),
    "lost_scaling": Fault("the saved model", "rope_parameters", setup=Setup("llama", sizes=YARN), saved=lost_scaling),
}
# The twelve kinds once more with other models, seeds and parameters, written after the search and not to suit it.
VARIANTS: dict[str, Fault] = {
    "stale_columns": Fault(
        ENGINE, "columns 8 to 15 of model.layers.0.self_attn.v_proj", 0, Setup("llama", seed=21), stale_columns
    ),
    "rotary_base_of_no_model": Fault(
        ENGINE,
        "the rotary base was about 3e+04",
        setup=Setup("qwen2", seed=22),
        engine_config=lambda config: config["rope_parameters"].update(rope_theta=30000.0),
    ),
    "colder": Fault(
        ENGINE,
        "those of temperature 0.85",
        setup=Setup("mistral", seed=23, settings={"grpo.temperature": 1.2}),
        sampling=lambda sampling: replace(sampling, temperature=0.85),
    ),
    "top_k": Fault(
        ENGINE,
        "renormalised over what top_k and top_p",
        setup=Setup("olmoe", seed=24, settings={"grpo.top_k": 8, "grpo.top_p": 0.95}),
        sampling=lambda sampling: replace(sampling, logprobs_of="drawn"),
    ),
    "bfloat16_attention": Fault(FORWARD, "bfloat16", 2, Setup("llama", seed=25), always=bfloat16_output),
    "doubled_bos": Fault(
        ENGINE,
        "a BOS token came before",
        setup=Setup("gemma3", True, 26),
        prompt=lambda ids, text, words: [ids[0], *ids],
    ),
    "swapped_far": Fault(ENGINE, "layers 0 and 2 have changed places", 0, Setup("qwen2", seed=27), swapped_far),
    "mask_back": Fault(ENGINE, "off by one", setup=Setup("qwen3_moe", seed=28), record=shift_back),
    "kept_cache_of_few_heads": Fault(
        ENGINE,
        "a cache was kept over a weight update",
        setup=Setup("llama", seed=29, sizes={"num_key_value_heads": 1}),
        recording=kept_cache,
    ),
    "unmerged_adapters": Fault(
        ENGINE,
        "adapters were not merged",
        setup=Setup("llama", seed=30, settings={"lora.rank": 8, "lora.alpha": 4.0}),
        publish=stale_all,
    ),
    "stale_head": Fault(
        ENGINE, "the weights of the head were those of version 0", setup=Setup("mistral", seed=31), publish=stale_head
    ),
    "no_prompt_of_the_answer": Fault(
        ENGINE,
        "without the prompt of the answer",
        setup=Setup("llama", seed=32, chat=True, bos=False),
        prompt=lambda ids, text, words: ids[: -len("<assistant>")],
    ),
}
