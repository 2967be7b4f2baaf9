"""Changes of weights: older ones, layers that have changed places, wrong adapters and heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from torch import Tensor

from forge.engines.prefixes import TOKENS as BLOCK
from forge.models.weight_layouts import EMBEDDING, HEAD

from .search import Search, Trial, layer_of, with_tensors

LAYERS = 12  # layers up to which all pairs are exchanged; of more those at a distance that is a power of 2
TENSORS = 64  # tensors of a model up to which each is tried by itself
PIECES = (2, 4, 8)  # into so many shards a tensor is divided


def stale(search: Search) -> Iterator[Trial]:
    """Older weights: all of them, of a layer, of a tensor, or of a shard of one."""
    plain = search.plain
    for older in search.others():
        changed = {
            name: older.tensors[name] for name, new in plain.tensors.items() if not older.tensors[name].equal(new)
        }
        if not changed:
            continue
        source = f"of version {older.number} in place of {search.plain.number}"
        trial = partial(with_tensors, search, "stale weights")
        yield trial(f"all weights were those {source}", changed)
        groups: dict[str, dict[str, Tensor]] = {}
        for name, tensor in changed.items():
            groups.setdefault(group_of(name), {})[name] = tensor
        trials = {group: trial(f"the weights of {group} were those {source}", some) for group, some in groups.items()}
        yield from trials.values()
        # The tensors of a small model one by one; of a large one those of the layers that look most like the answer.
        nearest_groups = search.nearest(trials) if len(changed) > TENSORS else list(groups)
        single = {
            name: trial(f"{name} was that {source}", {name: tensor})
            for group in nearest_groups
            for name, tensor in groups[group].items()
        }
        yield from single.values()
        for name in search.nearest(single):
            yield from _shards(search, name, older.tensors[name], source)


def _shards(search: Search, name: str, older: Tensor, source: str) -> Iterator[Trial]:
    """A shard of one tensor of older weights."""
    current = search.plain.tensors[name]
    for pieces in PIECES:
        for dim in range(current.dim()):
            size = current.shape[dim]
            for first in range(0, size, -(-size // pieces)):
                index = [slice(None)] * current.dim()
                index[dim] = slice(first, first + -(-size // pieces))
                mixed = current.clone()
                mixed[tuple(index)] = older[tuple(index)]
                axis = ("rows", "columns", "planes")[dim]
                last = min(first + -(-size // pieces), size) - 1
                text = f"a stale shard: {axis} {first} to {last} of {name} were those {source}"
                yield with_tensors(search, "stale weights", text, {name: mixed})


def exchanged(search: Search) -> Iterator[Trial]:
    """Layers in another order, and halves of matrices that have changed places."""
    plain, count = search.plain, search.plain.layers
    for first in range(count):
        for second in range(first + 1, count):
            distance = second - first
            if count > LAYERS and distance & (distance - 1):
                continue
            layers = {first: second, second: first}
            text = f"layers {first} and {second} have changed places"
            yield from _moved(search, layers, text, first)
    if count > 2:
        yield from _moved(
            search, {i: (i + 1) % count for i in range(count)}, "each layer has the weights of the next", 0
        )
        yield from _moved(search, {i: (i - 1) % count for i in range(count)}, "each layer has the weights before it", 0)
    for first_name, second_name in (("mlp.gate_proj", "mlp.up_proj"), ("self_attn.k_proj", "self_attn.v_proj")):
        pairs = [f"model.layers.{i}.{{}}.weight" for i in range(count)]
        changes: dict[str, Tensor] = {}
        for pair in pairs:
            a, b = pair.format(first_name), pair.format(second_name)
            if a in plain.tensors and b in plain.tensors:
                changes |= {a: plain.tensors[b], b: plain.tensors[a]}
        if changes:
            text = f"{first_name} and {second_name} have changed places in every layer"
            yield with_tensors(search, "order of weights", text, changes)


def _moved(search: Search, layers: Mapping[int, int], text: str, first: int) -> Iterator[Trial]:
    """Layers with the weights of others; none where their shapes differ."""
    tensors = search.plain.tensors
    changes = {}
    for name, tensor in tensors.items():
        layer = layer_of(name)
        if layer is None or layer not in layers:
            continue
        other = tensors.get(name.replace(f"model.layers.{layer}.", f"model.layers.{layers[layer]}.", 1))
        if other is None or other.shape != tensor.shape:
            return
        changes[name] = other
    with search.plain.with_tensors(changes):
        yield Trial("order of layers", text, search.plain.logprobs(), first)


def adapters(search: Search) -> Iterator[Trial]:
    """Adapters with another scale: not merged, without alpha / rank, or with it twice."""
    lora = search.store.run.lora
    if lora is None:
        return
    start, current = search.store.version(0).tensors, search.plain.tensors
    adapted = [name for name, tensor in current.items() if not tensor.equal(start[name])]
    scale = float(lora["alpha"]) / float(lora["rank"])
    for factor, words in {
        0.0: "adapters were not merged",
        1 / scale: f"the LoRA scale alpha / rank = {scale:g} was not applied",
        scale: f"the LoRA scale alpha / rank = {scale:g} was applied twice",
        2.0: "adapters were merged twice",
    }.items():
        if factor != 1 and adapted:
            changes = {name: start[name] + factor * (current[name] - start[name]) for name in adapted}
            yield with_tensors(search, "LoRA scale", words, changes)


def heads(search: Search) -> Iterator[Trial]:
    """A head that is tied to the embedding and should not be, or the reverse."""
    plain = search.plain
    embedding = plain.tensors[EMBEDDING]
    if not plain.tied and plain.tensors[HEAD].shape == embedding.shape:
        text = "the head was tied to the embedding, and tie_word_embeddings is false"
        yield with_tensors(search, "tied head", text, {HEAD: embedding})
    for older in search.others() if plain.tied else ():
        text = f"the head was not tied to the embedding: it had the weights of version {older.number}"
        yield with_tensors(search, "tied head", text, {HEAD: older.tensors[EMBEDDING]})
        # The reverse: a current head over an old embedding.
        with plain.with_tensors({EMBEDDING: older.tensors[EMBEDDING]}):
            hidden = plain.hidden()
        logits = hidden @ embedding.T
        text = f"the embedding was not tied to the head: it had the weights of version {older.number}"
        yield Trial("tied head", text, plain.logprobs(logits))


def old_cache(search: Search) -> Iterator[Trial]:
    """Keys and values of the context that an update of the weights should have dropped: all, or in whole blocks."""
    for older in search.others():
        text = (
            f"a cache was kept over a weight update: keys and values of the context are of version {older.number}, "
            f"those after of {search.plain.number}"
        )
        for block in (1, BLOCK):
            yield Trial("cache", text, search.plain.over(older.tensors, block))


def group_of(name: str) -> str:
    """The part of the model that a tensor belongs to, in words."""
    parts = name.split(".")
    if parts[:2] == ["model", "layers"]:
        return f"layer {parts[2]}"
    return {EMBEDDING: "the embedding", HEAD: "the head"}.get(name, "the last norm")
