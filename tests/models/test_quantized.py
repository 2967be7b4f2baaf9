"""A model with quantized weights, in a .gguf file or as published on the hub, is opened to the same model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from forge.models import find, resolve_model
from forge.system.checksums import DamagedFile
from tests.training.cases import TOKENIZER

gguf = pytest.importorskip("gguf")

TOKENS = ["<unk>", "<s>", "</s>", *"abcdefgh", "Ġ", "ab", "abc"]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write(path: Path, architecture: str = "llama") -> PreTrainedModel:
    """A tiny Llama as llama.cpp stores it, whose rotary embedding pairs neighbouring dimensions."""
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}</s>{% endfor %}")
    for name, tensor in model.state_dict().items():
        value = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = 4 if "q_proj" in name else 2
            value = value.reshape(heads, 2, -1, 32).swapaxes(1, 2).reshape(value.shape)
        parts = name.removesuffix(".weight").split(".")
        layer = f"blk.{parts[2]}." if parts[:2] == ["model", "layers"] else ""
        target = f"{layer}{NAMES['.'.join(parts[3:] if layer else parts)]}.weight"
        writer.add_tensor(target, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.costly
def test_gguf_file_loads_with_equal_logits_and_tokenizer(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    expected = write(tmp_path / "tiny.gguf").eval()
    folder = Path(resolve_model(str(tmp_path / "tiny.gguf")))
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.tensor([[1, 4, 5, 6, 3, 8]])
    torch.testing.assert_close(model(tokens).logits, expected(tokens).logits, rtol=0, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("abc", add_special_tokens=False).input_ids) == "abc"
    assert tokenizer.chat_template is not None
    assert tokenizer.eos_token == "</s>"
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(str(tmp_path / "tiny.gguf")) == str(folder)  # made once
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    (folder / "config.json").write_text("{}")
    with pytest.raises(DamagedFile, match=r"config\.json is damaged"):
        resolve_model(str(tmp_path / "tiny.gguf"))


def test_invalid_gguf_raises_one_line_error(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(FileNotFoundError, match=r"model file .*none\.gguf does not exist"):
        resolve_model(str(tmp_path / "none.gguf"))
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(ValueError, match=r"text\.gguf is not a GGUF file"):
        resolve_model(str(tmp_path / "text.gguf"))
    write(tmp_path / "whole.gguf")
    (tmp_path / "short.gguf").write_bytes((tmp_path / "whole.gguf").read_bytes()[:4000])
    with pytest.raises(ValueError, match=r"short\.gguf could not be opened as a GGUF file"):
        resolve_model(str(tmp_path / "short.gguf"))
    write(tmp_path / "other.gguf", "bloom")
    with pytest.raises(ValueError, match=r"other\.gguf"):
        resolve_model(str(tmp_path / "other.gguf"))
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


FP4 = torch.tensor([sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])


def quantize_fp8(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a weight (O, I) in blocks of 128 by 128, as DeepSeek and Qwen publish them, and what they say."""
    blocks = weight.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).float()
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    codes = (blocks / scales).to(torch.float8_e4m3fn)
    plain = (codes.float() * scales).flatten(2).flatten(0, 1)
    return {name: codes.flatten(2).flatten(0, 1), f"{name}_scale_inv": scales[:, 0, :, 0]}, plain


def quantize_mxfp4(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Random tensors of experts' weights (E, I, O) in 4 bits, as gpt-oss is published, and what they say."""
    experts, inputs, outputs = weight.shape
    codes = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    scales = torch.randint(120, 128, codes.shape[:3], dtype=torch.uint8)
    numbers = FP4[torch.stack([codes & 15, codes >> 4], -1).int()].flatten(3) * 2.0 ** (scales - 127.0)[..., None]
    return {f"{name}_blocks": codes, f"{name}_scales": scales}, numbers.flatten(2).transpose(1, 2)


QUANTIZED: dict[str, tuple[str, dict[str, Any], Any, tuple[str, ...], dict[str, Any]]] = {
    "fp8": (
        "llama",
        {"hidden_size": 256, "intermediate_size": 256},
        quantize_fp8,
        ("proj.weight",),
        {"weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    ),
    "mxfp4": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16},
        quantize_mxfp4,
        ("gate_up_proj", "down_proj"),
        {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]},
    ),
}


@pytest.mark.parametrize("method", QUANTIZED)
def test_published_quantized_weights_are_dequantized_exactly(method: str, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    family, sizes, quantize, endings, settings = QUANTIZED[method]
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": len(TOKENIZER)}
    config = AutoConfig.for_model(family, **sizes)
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    expected = load_file(folder / "model.safetensors")
    stored = dict(expected)
    for name in filter(lambda name: name.endswith(endings), expected):
        parts, plain = quantize(name, stored.pop(name))
        stored |= {part: tensor.contiguous() for part, tensor in parts.items()}
        expected[name] = plain.bfloat16()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {"quant_method": method, **settings}
    (folder / "config.json").write_text(json.dumps(values))

    find.check_family(str(folder))
    opened = load_file(Path(resolve_model(str(folder))) / "model.safetensors")
    assert opened.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in opened.items())
    assert len(stored) > len(expected)

    values["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"\A[^\n]*could not be opened as quantized weights: [^\n]*GPTQ[^\n]*\Z"):
        resolve_model(str(folder))
