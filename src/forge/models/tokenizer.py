"""Tokenizers: a model's, and one of single characters for small models on procedural tasks.

A process reads the configuration and tokenizer of a model folder only once, as many checks at the start of a run need
them. Each caller gets a copy of the configuration; all share the tokenizer, which one thread uses.
"""

import string
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
PRINTABLE = string.digits + string.ascii_letters + string.punctuation + " \n"


def character_tokenizer(alphabet: str = PRINTABLE) -> "PreTrainedTokenizerFast":
    """Return a Hugging Face tokenizer with one token per character of `alphabet`, after pad (0), eos (1) and unk (2).

    Encoding adds no special token; other characters become unk. `decode(encode(text)) == text` over the alphabet.

    Raises:
        ValueError: the alphabet is empty or repeats a character.
    """
    if not alphabet:
        raise ValueError("alphabet must have at least one character")

    if repeated := sorted({character for character in alphabet if alphabet.count(character) > 1}):
        raise ValueError(f"alphabet must not repeat characters, got {''.join(repeated)!r} more than once")

    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Every character is split off and looked up as a word; decoding joins them without spaces.
    vocabulary = {token: index for index, token in enumerate((PAD, EOS, UNKNOWN, *alphabet))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def has_tokenizer(folder: Path) -> bool:
    """Return whether a model's folder has a file of a tokenizer. For a folder without, transformers would make a
    tokenizer without vocabulary."""
    return any(path.name.startswith(("tokenizer", "vocab")) for path in folder.iterdir())


def open_tokenizer(name: str) -> Any:
    """Return the tokenizer of a model, a folder or hub id.

    Raises:
        ValueError: it cannot be read; the message says why in one line.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the tokenizers library raises plain Exception; its panics are BaseException
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"the tokenizer of model {name} cannot be read: {reason}") from error


def encode_prompt(text: str, tokenizer: Any) -> list[int]:
    """Return the token ids of a prompt without a chat template: with bos once, where both the text and the tokenizer
    write it, and without the eos that some tokenizers add, after which nothing would follow."""
    ids: list[int] = tokenizer(text)["input_ids"]
    ids = ids[1:] if ids[:2] == [tokenizer.bos_token_id] * 2 else ids
    # An eos that the text itself ends with stays.
    is_written = text.endswith(str(tokenizer.eos_token)) and ids[-2:] != [tokenizer.eos_token_id] * 2
    return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] and not is_written else ids


# A run reads its model, a reference or teacher, a critic and a reward model.
MODELS = 4


def model_config(folder: str | Path) -> "PretrainedConfig":
    """Return a new copy of the transformers configuration of the language model of a folder."""
    return deepcopy(_read_config(str(folder), _time_of_change(folder, "config.json")))


def model_tokenizer(folder: str | Path) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a model folder, which all callers share.

    Raises:
        ValueError: as `open_tokenizer`.
    """
    return _read_tokenizer(str(folder), _time_of_change(folder, "tokenizer_config.json"))


def smaller_vocabulary(tokenizer: Any) -> int | None:
    """Return the model's vocabulary size if the tokenizer in its folder has more tokens; None if not, or without a
    model."""
    folder = Path(getattr(tokenizer, "name_or_path", "") or "-")
    if not (folder / "config.json").is_file():
        return None
    size: int | None = getattr(model_config(folder).get_text_config(), "vocab_size", None)
    return size if size is not None and size < len(tokenizer) else None


@lru_cache(maxsize=MODELS)
def _read_config(folder: str, changed: int) -> "PretrainedConfig":
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    # Of a model with images the language model, where transformers' class for text reads the same files.
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    text = config.get_text_config()
    return config if has_images(config) or CLASSES.get(text.model_type) != CLASSES[config.model_type] else text


def has_images(config: "PretrainedConfig") -> bool:
    """Return whether a model is computed with its part for images: its config is marked, or it has no other form."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    return getattr(config, "forge_images", False) or config.model_type not in CLASSES


def model_class(config: "PretrainedConfig") -> Any:
    """Return transformers' class that loads models of this config."""
    import transformers

    return transformers.AutoModelForImageTextToText if has_images(config) else transformers.AutoModelForCausalLM


@lru_cache(maxsize=MODELS)
def _read_tokenizer(folder: str, changed: int) -> "PreTrainedTokenizerBase":
    return open_tokenizer(folder)


def _time_of_change(folder: str | Path, name: str) -> int:
    """Return when a file of a folder was written, in nanoseconds, or 0: part of the cache's key, as another run may
    write another model to the same folder."""
    try:
        return (Path(folder) / name).stat().st_mtime_ns
    except OSError:
        return 0
