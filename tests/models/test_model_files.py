"""Models and tables from strangers: nothing of them runs, waits or grows without a bound; each fault is one line."""

import ast
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forge.models import build_small_model, check_family, open_tokenizer, resolve_model
from forge.models.files import try_tokenizer

ROOT = Path(__file__).parents[2]
CALLS = ("from_pretrained", "from_config", "load_dataset")
OWN = ("Policy", "ScalarModel", "ParallelDims", "sizes")  # classes with such methods that are not of transformers
LOADERS = re.compile(r"AutoModel\w*|kind|loader")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 2, "max_positions": 32}
    return Path(build_small_model(tmp_path_factory.mktemp("small") / "model", seed=0, alphabet="abc ", **sizes))


@pytest.fixture
def model(small: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(small, folder)
    (folder / "checksums.txt").unlink()
    return folder


def calls() -> list[Any]:
    found = []
    for path in sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "apps").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in CALLS:
                owner = ast.unparse(node.func).rpartition(".")[0]
                if owner not in OWN:
                    found.append(pytest.param(node, owner, id=f"{path.relative_to(ROOT)}:{node.lineno}"))
    return found


@pytest.mark.parametrize(("call", "owner"), calls())
def test_model_code_and_pickles_are_never_loaded(call: ast.Call, owner: str):
    given = {word.arg: word.value.value for word in call.keywords if isinstance(word.value, ast.Constant)}
    assert given.get("trust_remote_code") is False
    if LOADERS.fullmatch(owner) and ast.unparse(call.func).endswith("from_pretrained"):
        assert given.get("use_safetensors") is True or any(word.arg == "gguf_file" for word in call.keywords)


MALFORMED = {
    "list": "[1]",
    "text": '"qwen3"',
    "number": "1",
    "null": "null",
    "true": "true",
    "empty": "",
    "space": " ",
    "word": "qwen3",
    "cut": '{"model_type": "qwen3"',
    "deep": "[" * 100_000,
    "deep_mapping": '{"a":' * 100_000,
    "digits": '{"model_type": "qwen3", "vocab_size": ' + "1" * 5000 + "}",
    "layers_as_text": '{"model_type": "qwen3", "num_hidden_layers": "many"}',
    "family_list": '{"model_type": ["qwen3"]}',
    "family_number": '{"model_type": 3}',
    "family_long": '{"model_type": "' + "x" * 100_000 + '"}',
    "family_lines": '{"model_type": "a\\nb"}',
    "bytes": b'{"model_type": "\xff"}',
    "utf16": '{"model_type": "qwen3"}'.encode("utf-16"),
    "nul": b"\0" * 1000,
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_model_config_raises_one_line_error(content: str | bytes, model: Path):
    (model / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"\Amodel [^\n]{1,2000}\Z"):
        check_family(str(model))


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_malformed_checksum_raises_one_line_error(make: Any, small: Path, tmp_path: Path):
    shutil.copytree(small, tmp_path / "model")
    (tmp_path / "model/config.json").unlink()
    make(tmp_path / "model/config.json")
    with pytest.raises(OSError, match=r"\A[^\n]*config.json[^\n]*\Z"):
        resolve_model(str(tmp_path / "model"))


@pytest.mark.parametrize("content", ["[1]", "[" * 100_000, "{", '{"weight_map": {"a": "../b"}}'], ids=range(4))
@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "model.safetensors.index.json"])
def test_malformed_model_files_raise_one_line_error(content: str, name: str, model: Path):
    if name == "tokenizer_config.json" and "weight_map" in content:
        content = "7"
    if name == "generation_config.json" and "weight_map" in content:
        content = '{"eos_token_id": ' + "1" * 5000 + "}"
    (model / name).write_text(content)
    with pytest.raises(ValueError, match=rf"\Amodel [^\n]*{name}[^\n]*\Z"):
        resolve_model(str(model))


@pytest.mark.parametrize(
    "content", ["[" * 1_000_000, "[1]", "{}", "7", '{"model": {"type": "None"}}', "\0", '{"a": ' * 200]
)
def test_malformed_tokenizer_raises_one_line_error(content: str, model: Path):
    (model / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"\Athe tokenizer of model [^\n]{1,1000}\Z"):
        open_tokenizer(str(model))


PANICS: dict[str, dict[str, Any]] = {
    "pattern": {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    },
    "length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "strip": {"decoder": {"type": "Strip", "content": "a", "start": 1 << 40, "stop": 1 << 40}},
    "template": {
        "post_processor": {
            "type": "TemplateProcessing", "pair": [], "special_tokens": {},
            "single": [{"SpecialToken": {"id": "nope", "type_id": 0}}],
        }
    },
    "characters": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "abort": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAAAAAAA"}},
    "growth": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}] * 8,
        }
    },
    "prefix": {
        "model": {
            "type": "BPE", "continuing_subword_prefix": "ééé",
            "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]],
        }
    },
}  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize(
    "change",
    [pytest.param(change, id=name, marks=[pytest.mark.full] * (name == "growth")) for name, change in PANICS.items()],
)
def test_crashing_tokenizer_raises_one_line_error(change: dict[str, Any], model: Path):
    values = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(values | change))
    with pytest.raises(ValueError, match=r"\Amodel [^\n]*tokenizer or chat template cannot be used: [^\n]+\Z"):
        try_tokenizer(model)


@pytest.mark.parametrize(
    "change",
    [
        {"_attn_implementation": "evil/kernel"},
        {"attn_implementation": "evil/kernel@main:function"},
        {"_attn_implementation_internal": "evil/kernel"},
        {"experts_implementation": "evil/kernel"},
        {"_experts_implementation_internal": "evil/kernel"},
        {"_attn_implementation": {"text_config": "evil/kernel"}},
        {"text_config": {"_attn_implementation": "evil/kernel"}},
        {"a": [{"attn_implementation": "evil/kernel"}]},
    ],
    ids=range(8),
)
def test_model_config_with_remote_code_raises_one_line_error(change: dict[str, Any], model: Path):
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(ValueError, match=r"\Amodel [^\n]*which names code of another repository: remove the key\Z"):
        check_family(str(model))
    (model / "config.json").write_text(json.dumps(values | {"_attn_implementation": "sdpa"}))
    check_family(str(model))


@pytest.mark.parametrize("size", [0, 7, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_inconsistent_safetensors_header_raises_one_line_error(size: int, model: Path):
    (model / "model.safetensors").write_bytes(struct.pack("<Q", size) + b"{" * 100)
    with pytest.raises(ValueError, match=r"\Amodel [^\n]*model.safetensors is damaged[^\n]*\Z"):
        resolve_model(str(model))


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "last.ckpt", "a.pth"]
)
def test_model_with_only_pickled_weights_raises(name: str, model: Path):
    (model / "model.safetensors").rename(model / name)
    with pytest.raises(ValueError, match=rf"\A[^\n]*weights as {name} only, a pickle[^\n]*\Z"):
        resolve_model(str(model))


@pytest.mark.parametrize("start", [b"", b"GGUF", b"GGUF" + b"\xff" * 20, b"PK\3\4"])
def test_inconsistent_gguf_header_raises_one_line_error(start: bytes, tmp_path: Path):
    (tmp_path / "model.gguf").write_bytes(start)
    with pytest.raises(ValueError, match=r"\A[^\n]*GGUF[^\n]*\Z"):
        resolve_model(str(tmp_path / "model.gguf"))


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("content", [pytest.param("[1]", id="list"), pytest.param("[" * 100_000, id="deep")])
def test_commands_report_invalid_model_in_one_line_error(content: str, model: Path, tmp_path: Path):
    (model / "config.json").write_text(content)
    words = ["train", "tests/forge_cluster/tiny.yaml", "--model", str(model), "--from_scratch", "null"]
    words += ["--run.root", str(tmp_path / "runs")]
    for command in (["serve", str(model)], words):
        done = subprocess.run(
            [sys.executable, "-m", "forge", *command], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert re.fullmatch(rf"error: model {model}: config.json [^\n]*\n", done.stderr)


REWARD_MODEL = "BatchedModel(ModelSettings(path=folder, name='x'), AutoModelForSequenceClassification)"
EVIL = """
import pathlib
pathlib.Path("{}").touch()
from transformers import PretrainedConfig
class Evil(PretrainedConfig):
    model_type = "evil"
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "load",
    [pytest.param(load, marks=pytest.mark.full) for load in ("open_tokenizer(folder)", "check_family(folder)")]
    + [REWARD_MODEL],
)
def test_model_remote_code_is_not_run_even_if_confirmed(load: str, model: Path, tmp_path: Path):
    (model / "evil.py").write_text(EVIL.format(tmp_path / "PWNED"))
    names = {
        "AutoConfig": "evil.Evil",
        "AutoTokenizer": ["evil.Evil", None],
        "AutoModelForSequenceClassification": "evil.Evil",
    }
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((model / name).read_text()) | {"auto_map": names}
        values |= {"model_type": "evil"} if name == "config.json" else {"tokenizer_class": "Evil"}
        (model / name).write_text(json.dumps(values))
    code = "\n".join(
        [
            "from forge.models import check_family, open_tokenizer",
            "from forge_verifiers.models import BatchedModel, ModelSettings",
            "from transformers import AutoModelForSequenceClassification",
            f"folder = {str(model)!r}",
            load,
        ]
    )
    done = subprocess.run([sys.executable, "-c", code], input="y\ny\ny\n", capture_output=True, text=True, check=False)
    assert not (tmp_path / "PWNED").exists(), done
    assert done.returncode != 0 or "open_tokenizer" in load, done
