"""Prompts with images: tokens and log-probabilities are transformers', and a small model learns to name colours."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
    Qwen3VLProcessor,
    SmolVLMImageProcessorPil,
    SmolVLMProcessor,
)
from transformers.models.smolvlm import processing_smolvlm

import forge
from forge.data.packing import pack
from forge.data.stream import hash_item
from forge.engines import EmbeddedEngine
from forge.models.tokenizer import character_tokenizer
from forge.training.policy import Policy
from forge.types import Episode, Prompt, Sample, Sampling
from forge_families.images import expand_tokens, insert_images, mark_model, open_processor, read_images

COLORS = {"red": (220, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 220), "black": (20, 20, 20)}
TEMPLATE = (
    "{%% for m in messages %%}{%% if m['content'] is string %%}{{ m['content'] }}{%% else %%}"
    "{%% for p in m['content'] %%}{%% if p['type'] == 'image' %%}%s{%% else %%}{{ p['text'] }}{%% endif %%}"
    "{%% endfor %%}{%% endif %%}{%% if m['role'] == 'assistant' %%}<eos>{%% endif %%}{%% endfor %%}"
)
TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
IDEFICS = (
    {"image_token": "<image>", "fake": "<fake_token_around_image>", "global": "<global-img>"},
    "<image>",
    {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": VISION | {"image_size": 28, "patch_size": 7},
        "scale_factor": 2,
    },
)
QWEN_MARKS = {"start": "<|vision_start|>", "image_token": "<|image_pad|>", "end": "<|vision_end|>"}
QWEN_MARKS |= {"video": "<|video_pad|>"}
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_VISION = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64}
DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
# By model type: special tokens by name, what a template writes for an image, and the values of the config.
KINDS: dict[str, tuple[dict[str, str], str, dict[str, Any]]] = {
    "gemma3": (
        {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<img>"},
        "<boi>",
        {
            "text_config": TEXT | {"sliding_window": 64},
            "vision_config": VISION | {"image_size": 28, "patch_size": 7},
            "mm_tokens_per_image": 4,
        },
    ),
    "idefics3": IDEFICS,
    "smolvlm": IDEFICS,
    "qwen2_5_vl": (
        QWEN_MARKS,
        QWEN_IMAGE,
        {
            "text_config": TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
            "vision_config": QWEN_VISION,
        },
    ),
    "qwen3_5": (
        QWEN_MARKS,
        QWEN_IMAGE,
        {
            "text_config": TEXT | DELTA | {"layer_types": ["linear_attention", "full_attention"]},
            "vision_config": QWEN_VISION | {"num_position_embeddings": 16, "patch_size": 14},
        },
    ),
}


def make_processor(kind: str, tokenizer: Any) -> Any:
    if kind == "gemma3":
        return Gemma3Processor(Gemma3ImageProcessorPil(size={"height": 28, "width": 28}), tokenizer, image_seq_length=4)
    sizes = {"size": {"longest_edge": 28}, "max_image_size": {"longest_edge": 28}, "do_image_splitting": False}
    if kind == "idefics3":
        return Idefics3Processor(Idefics3ImageProcessorPil(**sizes), tokenizer, image_seq_len=4)
    if kind == "smolvlm":
        return SmolVLMProcessor(SmolVLMImageProcessorPil(**sizes), tokenizer, image_seq_len=4)
    qwen_class = Qwen2_5_VLProcessor if kind == "qwen2_5_vl" else Qwen3VLProcessor
    return qwen_class(Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 56), tokenizer)


def write_model(folder: Path, kind: str) -> Path:
    """A small model that reads images, with a character tokenizer and its processor."""
    marks, mark, values = KINDS[kind]
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz ?\n")
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks.values())})
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"extra_special_tokens": marks, "chat_template": TEMPLATE % mark}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    make_processor(kind, tokenizer).save_pretrained(folder)

    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in marks.items()}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    text = values["text_config"] | {"vocab_size": len(tokenizer), **ends}
    tokens = {"image_token_id": ids["image_token"], "image_token_index": ids["image_token"]}
    tokens |= {"boi_token_index": ids.get("boi_token"), "eoi_token_index": ids.get("eoi_token")}
    tokens |= {"vision_start_token_id": ids.get("start"), "video_token_id": ids.get("video")}
    config = AutoConfig.for_model(kind, **values | {"text_config": text} | tokens | ends)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder


def draw_picture(color: str, seed: int = 0) -> bytes:
    """A square of about this colour, as the bytes of a file."""
    shift = random.Random(seed).randint(-20, 20)
    buffer = io.BytesIO()
    Image.new("RGB", (28, 28), tuple(max(0, value + shift) for value in COLORS[color])).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("kind", KINDS)
def test_image_logprobs_of_engine_and_trainer_match_transformers(kind: str, tmp_path: Path, monkeypatch):
    # Processors of videos ask for torchvision, which a CPU build of PyTorch may lack, and for num2words.
    for processor_class in (Qwen2_5_VLProcessor, Qwen3VLProcessor, SmolVLMProcessor):
        monkeypatch.setattr(
            processor_class, "get_attributes", classmethod(lambda cls: ["image_processor", "tokenizer"])
        )
    monkeypatch.setattr(SmolVLMProcessor.__init__, "__defaults__", (None, 4, None))
    monkeypatch.setattr(processing_smolvlm, "num2words", str)
    source = write_model(tmp_path / "model", kind)
    folder = Path(mark_model(str(source), str(tmp_path / "marked")))
    model = AutoModelForImageTextToText.from_pretrained(source).eval()
    mark = KINDS[kind][1]
    prompts = [(draw_picture("red"),), (draw_picture("blue"),), (draw_picture("green"), draw_picture("black")), ()]
    ids = [expand_tokens(folder, mark * len(images) + "what ?", images) for images in prompts[:3]]
    ids.append(AutoTokenizer.from_pretrained(folder)("what ?", add_special_tokens=False)["input_ids"])
    processor = open_processor(str(folder))

    with EmbeddedEngine(folder, slots=4, prefill_tokens=7 if kind == "gemma3" else None) as engine:
        futures = [
            engine.submit(tokens, Sampling(n=2, max_tokens=6, seed=i, images=images))
            for i, (tokens, images) in enumerate(zip(ids, prompts, strict=True))
        ]
        completions = [(images, c) for images, f in zip(prompts, futures, strict=True) for c in f.result(60)]

    episodes = [Episode(completion, 1.0) for _, completion in completions]
    for episode, (images, completion) in zip(episodes, completions, strict=True):
        episode.images, episode.advantage = images, 1.0
        pictures = [Image.open(io.BytesIO(file)) for file in images]
        text = [mark * len(images) + "what ?"]
        inputs = processor(text=text, images=[pictures] if images else None, return_tensors="pt")
        answer = torch.tensor([completion.token_ids])
        for name in inputs.keys() & {"token_type_ids", "mm_token_type_ids"}:
            inputs[name] = torch.cat([inputs[name], torch.zeros_like(answer)], 1)
        inputs |= {"input_ids": torch.cat([inputs["input_ids"], answer], 1)}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        with torch.no_grad():
            logits = model(**inputs).logits[0, -1 - answer.shape[1] : -1]
        logits[:, model.config.image_token_id] = -1e9
        expected = logits.log_softmax(-1).gather(1, answer.T)[:, 0]
        np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=2e-5)
    assert len({tuple(images) for images, _ in completions}) == 4

    batch = pack(episodes)
    scores = Policy.from_pretrained(folder)(batch).logprobs.detach().numpy()
    np.testing.assert_allclose(scores, batch.logprobs[batch.mask], atol=2e-5)
    batch.images = None
    blind_scores = Policy.from_pretrained(folder)(batch).logprobs.detach().numpy()
    assert np.abs(blind_scores - scores).max() > 1e-3


@pytest.mark.processes
def test_small_image_model_learns_to_name_a_color(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    model = write_model(tmp_path / "model", "gemma3")
    names = list(COLORS) * 16
    rows = [{"question": "what ?", "answer": n, "images": [draw_picture(n, i)]} for i, n in enumerate(names)]
    settings: dict[str, Any] = {"dataset": rows, "chat_template": True, "images_field": "images", "seq_len": 512}
    warm_up = {"steps": 60, "batch_size": 32, "learning_rate": 2e-3}
    held_out = {"accuracy": True, "problems": 32, "every": 60, "max_tokens": 8}
    learned = forge.sft(str(model), name="warmup", **settings, **warm_up, eval=held_out)
    accuracies = [row["eval/accuracy"] for row in learned.metrics if "eval/accuracy" in row]
    assert accuracies[-1] > 0.7  # of four colors

    result = forge.train(
        "runs/warmup/model",
        name="rl",
        **settings,
        reward="ExactMatch",
        steps=3,
        batch_size=16,
        n_samples=8,
        max_tokens=8,
        learning_rate=1e-3,
        max_policy_age=0,
        services={"reward": None},
    )
    differences = [row["train/engine_difference"] for row in result.metrics if "train/engine_difference" in row]
    assert max(differences) < 1e-5
    assert (Path("runs/rl/model/processor_config.json")).is_file()
    assert "data:image/png" in (Path("runs/rl/rollouts.arrow")).read_bytes().decode(errors="replace")


def test_images_of_all_types_are_read_and_invalid_ones_raise(tmp_path: Path):
    file = draw_picture("red")
    (tmp_path / "red.png").write_bytes(file)
    path = str(tmp_path / "red.png")
    assert read_images([path, file, {"bytes": file}, {"bytes": None, "path": path}]) == (file,) * 4
    (picture,) = read_images(Image.open(io.BytesIO(file)))
    assert Image.open(io.BytesIO(picture)).getpixel((0, 0)) == Image.open(io.BytesIO(file)).getpixel((0, 0))
    sample = Sample(Prompt("what ?", (1, 2), images=(file,)), "red")
    other = Sample(Prompt("what ?", (1, 2), images=(draw_picture("blue"),)), "blue")
    assert hash_item(sample) != hash_item(other)  # held-out prompts that differ by their images only are others
    for bad in (["none.png"], [b"no image"], [3]):
        with pytest.raises(ValueError, match=r"\Aimage 1 \([^\n]*\) cannot be read: [^\n]*\Z"):
            read_images(bad)
    with pytest.raises(ValueError, match="has <image> 2 times, but 1 images"):
        insert_images([{"role": "user", "content": "<image> or <image>?"}], 1)
    with pytest.raises(ValueError, match="has no processor of images"):
        mark_model(str(tmp_path), str(tmp_path / "marked"))


def test_image_model_links_do_not_replace_directory_of_another_run(tmp_path: Path):
    model = write_model(tmp_path / "model", "gemma3")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/metrics.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"other exists: .* choose another run\.name"):
        mark_model(str(model), str(tmp_path / "other"))
    assert (tmp_path / "other/metrics.jsonl").is_file()

    for _ in range(2):  # its own links are made again
        marked = mark_model(str(model), str(tmp_path / "marked"))
    assert json.loads((Path(marked) / "config.json").read_text())["forge_images"]
    assert (model / "config.json").is_file()
