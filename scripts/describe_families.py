"""Ask every causal language model of transformers what trainer and engine compute, and write docs/models.md's table.

make families

Each type is a small model with random weights. Its largest differences from transformers' own forward pass, and of its
gradients, go to docs/families.tsv, and the counts to the page.
"""

from __future__ import annotations

import copy
import csv
import json
import logging
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, TABLE = ROOT / "docs/models.md", ROOT / "docs/families.tsv"
BEGIN, END = "<!-- made by scripts/describe_families.py -->\n", "<!-- end of the table -->\n"
COLUMNS = ("type", "trainer", "logprob", "gradient", "engine", "engine_logprob", "cpu_seconds", "reason")
LIMIT = 60  # seconds for one type
EXACT = 1e-4
TIERS = {"forge_packed": "packed", "sdpa": "rows", "eager": "rows"}

# Values without which a class's default config is no language model, or not like its published models.
BERT = "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta reformer xmod"
BERT += " roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl"
VALUES: dict[str, dict[str, Any]] = {
    **{kind: {"is_decoder": True} for kind in BERT.split()},
    **{kind: {"head_dim": 128} for kind in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "nemotron": {"num_key_value_heads": 8},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 4, "num_hidden_layers": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "xlm": {"causal": True},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "bamba": {"attn_layer_indices": [1, 3], "num_hidden_layers": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "num_hidden_layers": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 8},
}


def language_config(kind: str) -> Any:
    """The config of a type's language model, as `forge.models.tokenizer.model_config` takes it from a folder."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    config = CONFIG_MAPPING[kind](**VALUES.get(kind, {}))
    if "text_config" not in config.sub_configs:
        return config
    text = config.get_text_config()
    return text if CLASSES.get(text.model_type) == CLASSES.get(config.model_type) else config


def measure_trainer(config: Any, row: dict[str, str]) -> None:
    """Fill in the trainer's tier, its differences from transformers, and the CPU-seconds of all that."""
    import numpy as np
    import torch

    from forge.types import Batch
    from forge_families.policy import FamilyPolicy
    from forge_families.probe import build_small_model, draw_sequences, find_traits

    traits = find_traits(config)
    row |= {"trainer": TIERS[traits.attention], "reason": traits.reason}
    if "cannot be cut" in traits.reason:
        row["trainer"] = "rows, not compared"
        return

    model = build_small_model(config)
    plain = copy.deepcopy(model)
    sequences = draw_sequences(model.config.get_text_config().vocab_size)
    lengths = np.array([len(tokens) for tokens in sequences])
    mask = np.ones(lengths.sum(), dtype=np.bool_)
    mask[np.cumsum(lengths) - lengths] = False
    zeros = np.zeros(len(mask), dtype=np.float32)
    batch = Batch(torch.cat(sequences).numpy(), lengths, mask, zeros, zeros, zeros, zeros)
    scored = FamilyPolicy(model, traits).train()(batch).logprobs
    expected = torch.cat(
        [
            plain(input_ids=tokens[None], use_cache=False)
            .logits[0, :-1]
            .float()
            .log_softmax(-1)
            .gather(1, tokens[1:, None])
            for tokens in sequences
        ]
    )[:, 0]
    row["logprob"] = f"{float((scored - expected).abs().max()):.1e}"

    share = torch.linspace(-1, 1, len(expected)) / len(expected)
    for values in (scored, expected):
        (share @ values).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    pairs = [(p.grad, gradients[name]) for name, p in plain.named_parameters() if p.grad is not None]
    largest = max(float(grad.abs().max()) for grad, _ in pairs)
    difference = max(float((grad - (0 if own is None else own)).abs().max()) for grad, own in pairs)
    row["gradient"] = f"{difference / max(largest, 1e-30):.1e}"


def measure_engine(config: Any, row: dict[str, str]) -> None:
    """Fill in how the embedded engine generates, and its difference from what transformers' forward pass scores."""
    from forge_families.engine import find_tier, measure_difference
    from forge_families.probe import build_small_model

    tier = find_tier(config)
    row["engine"] = f"{tier.name}, not compared"
    difference = measure_difference(build_small_model(config), tier)
    row |= {"engine": tier.name, "engine_logprob": f"{difference:.1e}"}


def describe(kind: str) -> dict[str, str]:
    """The row of a type."""
    row = dict.fromkeys(COLUMNS, "")
    row["type"] = kind
    start = time.process_time()
    for measure, column in ((measure_trainer, "trainer"), (measure_engine, "engine")):
        signal.alarm(LIMIT)
        try:
            measure(language_config(kind), row)
        except Exception as error:  # the table says it
            row[column] = row[column] or "no"
            text = " ".join(str(error).split())[:160] or type(error).__name__
            row["reason"] = "; ".join(filter(None, (row["reason"], f"{column}: {text}")))
        signal.alarm(0)
    row["cpu_seconds"] = f"{time.process_time() - start:.1f}"
    return row


def write_page(rows: list[dict[str, str]]) -> None:
    """Write the counts and the lists of types to the page."""
    import transformers

    own = ["llama", "qwen2", "qwen3", "mistral", "olmo2", "smollm3", "phi3", "gemma3_text", "qwen3_moe", "olmoe"]

    def number(text: str) -> float:
        return float(text or "nan")

    trained = [r for r in rows if r["trainer"] in ("packed", "rows") and number(r["logprob"]) <= EXACT]
    generated = [r for r in rows if number(r["engine_logprob"]) <= EXACT or r["type"] in own]
    both = [r for r in trained if r in generated]
    tiers = {tier: [r["type"] for r in both if r["engine"] == tier] for tier in ("cached", "whole")}
    lists = [
        ("packed", [r["type"] for r in trained if r["trainer"] == "packed"]),
        ("rows", [r["type"] for r in trained if r["trainer"] == "rows"]),
        ("trained only, the engine differs", [r["type"] for r in trained if r not in both]),
        ("trained with larger differences", [r["type"] for r in rows if number(r["logprob"]) > EXACT]),
        ("rows without a comparison", [r["type"] for r in rows if r["trainer"] == "rows, not compared"]),
        ("no", [r["type"] for r in rows if r["trainer"] == "no"]),
    ]
    lines = [
        f"Of the {len(rows)} causal types of transformers {transformers.__version__}, {len(trained)} train with "
        f"log-probabilities within {EXACT:g} of transformers', {len(generated)} generate so in the embedded engine, "
        f"{len(both)} do both, {len(tiers['cached'])} with transformers' cache and {len(tiers['whole'])} by passes of "
        "all tokens ([each type, with its differences and reasons](families.tsv)):",
        "",
        "| trainer | | types |",
        "|---|---|---|",
        *(f"| {title} | {len(kinds)} | {' '.join(f'`{kind}`' for kind in kinds)} |" for title, kinds in lists),
        "",
    ]
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(head + BEGIN + "\n".join(lines) + END + rest.partition(END)[2])


def main(kinds: list[str]) -> None:
    """Describe these types, by default all, and write the table, in which the others stay as they are."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    rows = {}
    if kinds:
        with TABLE.open(newline="") as file:
            rows = {row["type"]: row for row in csv.DictReader(file, delimiter="\t")}
    for kind in kinds or list(CLASSES):
        rows[kind] = describe(kind)
        print(json.dumps(rows[kind]), flush=True)

    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows.values())
    write_page(list(rows.values()))


if __name__ == "__main__":
    import torch
    import transformers

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)

    def stop(*_: Any) -> None:
        raise TimeoutError(f"not finished after {LIMIT} s")

    signal.signal(signal.SIGALRM, stop)
    main(sys.argv[1:])
