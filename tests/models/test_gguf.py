"""A model in a .gguf file is opened to the same model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from forge.models import resolve_model
from forge.system.checksums import DamagedFile

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


def test_invalid_gguf_raises_one_line(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(FileNotFoundError, match=r"model file .*none\.gguf does not exist"):
        resolve_model(str(tmp_path / "none.gguf"))
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(ValueError, match=r"text\.gguf is not a GGUF file"):
        resolve_model(str(tmp_path / "text.gguf"))
    write(tmp_path / "whole.gguf")
    (tmp_path / "short.gguf").write_bytes((tmp_path / "whole.gguf").read_bytes()[:4000])
    with pytest.raises(ValueError, match=r"short\.gguf could not be opened as GGUF"):
        resolve_model(str(tmp_path / "short.gguf"))
    write(tmp_path / "other.gguf", "bloom")
    with pytest.raises(ValueError, match=r"other\.gguf"):
        resolve_model(str(tmp_path / "other.gguf"))
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
