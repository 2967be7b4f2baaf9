"""Files of a model: settings are read as JSON, weights from safetensors only, and what programs of other libraries
interpret (tokenizer, chat template) is tried in a child process with limits on time and memory first."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..system.trial import try_in_child

WEIGHTS = "*.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
# What a config.json may name as the code of attention and experts: an implementation, and no repository of the hub.
IMPLEMENTATION = re.compile(r"_?\w*_implementation(_internal)?")
TEXTS = ("a" * 64 + "!", "Hello, world! 12 \u00e9\n", " ", "")


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file of a model.

    Raises:
        ValueError: the file is not JSON or not a mapping, or names code of the hub.
    """
    if not path.is_file():  # reading a pipe would wait for ever
        raise ValueError(f"{path.name} is not a regular file")

    try:
        values = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {' '.join(str(error).split())}") from None

    if not isinstance(values, dict):
        raise ValueError(f"{path.name} must be a mapping, not {type(values).__name__}")
    _check_implementations(values, path.name)
    return values


def check_model_files(folder: Path) -> None:
    """Check the settings and weights in a model's folder.

    Raises:
        ValueError: a file is malformed or names code of the hub, or all weights are pickles, which may run code when
            they are loaded.
    """
    weights = sorted(folder.glob(WEIGHTS))
    pickles = [path.name for pattern in PICKLES for path in sorted(folder.glob(pattern))]
    if pickles and not weights:  # pickles alongside safetensors are never read
        raise ValueError(
            f"model folder {folder} has its weights as {pickles[0]} only, a pickle, which can run code: if you trust "
            "the file, save it as safetensors (model.save_pretrained)"
        )

    try:
        for path in sorted(folder.glob("*.json")):
            values = read_json(path) if path.name.startswith(("config", "generation_", "tokenizer_config")) else {}
            if path.name == "config.json" and values.get("model_type") is None:
                raise ValueError("config.json has no key model_type: save the model again with transformers")
        for path in sorted(folder.glob("*.index.json")):
            _check_index(path)
        for path in weights:
            _check_weights(path)
    except ValueError as error:
        raise ValueError(f"model {folder}: {error}") from None


def try_tokenizer(folder: Path) -> None:
    """Try a model's tokenizer and chat template in a child process, as their libraries abort or hang on some files.

    Raises:
        ValueError: the child process aborted or hung, or the tokenizer is malformed.
    """
    if (folder / "tokenizer.json").exists():
        try_in_child(f"{__name__}:use_tokenizer", str(folder), subject=f"model {folder}: tokenizer or chat template")


def use_tokenizer(folder: str) -> None:
    """Encode and decode texts and render the chat template of a model's folder, as a run would.

    `try_tokenizer` calls this in the child process, where it may abort or hang.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    for text in TEXTS:
        with suppress(Exception):  # a text that it has no tokens for; a panic is not an Exception
            tokenizer.decode(tokenizer.encode(text).ids)

    from jinja2 import TemplateError, Undefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"])
    environment.undefined = type("Anything", (Undefined,), {"__call__": lambda self, *_, **__: ""})
    file = Path(folder) / "chat_template.jinja"
    settings = Path(folder) / "tokenizer_config.json"
    template = file.read_text() if file.exists() else settings.exists() and read_json(settings).get("chat_template")
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]

    # The template may need what transformers adds, or reject these messages.
    with suppress(TemplateError, TypeError):
        if isinstance(template, str):
            environment.from_string(template).render(messages=messages, add_generation_prompt=True)


def _check_implementations(values: object, name: str) -> None:
    """Raise ValueError if nested settings name code from the hub to compute attention or experts.

    Transformers loads it for a name with a slash, whatever `trust_remote_code` says.
    """
    if isinstance(values, list):
        values = dict(enumerate(values))
    for key, value in values.items() if isinstance(values, dict) else ():
        if IMPLEMENTATION.fullmatch(str(key)):
            # One implementation for the model, or one for each of its parts.
            for code in value.values() if isinstance(value, dict) else [value]:
                if isinstance(code, str) and re.fullmatch(r"\w+", code) is None:
                    raise ValueError(
                        f"{name} has {key} = {code[:80]!a}, which names code of another repository: remove the key"
                    )
        _check_implementations(value, name)


def _check_index(path: Path) -> None:
    """Raise ValueError if an index of weights names files outside its folder, or is malformed."""
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict):
        raise ValueError(f"{path.name} has no key weight_map: save the model again")
    for file in files.values():
        if not isinstance(file, str) or re.fullmatch(r"[\w.][\w. -]*", file) is None:
            raise ValueError(f"{path.name} names {str(file)[:80]!a}, which is not a file of this directory")


def _check_weights(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            return
    except (SafetensorError, OverflowError, MemoryError) as error:
        raise ValueError(f"{path.name} is damaged: {' '.join(str(error).split())}") from None
