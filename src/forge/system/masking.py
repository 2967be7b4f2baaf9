"""Mask secrets in what is shown or written: the run directory, trackers, model cards, reports, log lines, errors.

Masked are: values of names such as `api_key`; all values of environments and HTTP headers; the value of an environment
variable with such a name, wherever it occurs; keys that start like those of known services; passwords in URLs. A
secret that none of these rules finds, such as one in a sentence, stays.
"""

import os
import re
from collections.abc import Iterator
from typing import Any

Json = Any  # dicts, lists, strings, numbers, booleans and None

MASK = "***"
MIN_VALUE = 8  # characters of an environment variable's value from which it is looked for in texts

# The words of a name: api-key, apiKey and API_KEY have two, apikey has one.
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
# Names of mappings and lists whose values are all masked.
_PLACES = re.compile(r"(.*_)?(headers?|cookies?|env(ironment)?_var(iable)?s)|env(iron(ment)?)?")
_OWNERS = (
    "access|account|admin|anthropic|api|app|auth|azure|bearer|bot|client|encryption|github|gitlab|google|hf|hub|id|login"
    "|master|oauth|openai|personal|private|refresh|sas|secret|service|session|signing|ssh|subscription|user|wandb"
)
_NAME = re.compile(
    rf"(.*_)?((({_OWNERS})_?)(keys?|tokens?)|api_?keys?|token|[a-z]*passwords?|passwd|passphrase|pass|pwd|secrets?|[a-z]+secret"
    r"|credentials?|creds?|cookies?|(proxy_)?authorization|bearer|auth|oauth|jwt|dsn|(github|gitlab)_pat|webhook(_url)?"
    r"|access_key_id|private_key_pem|connection_?string|(amz_|goog_)?signature|sig)|keys"
)
# Names of special tokens, and of numbers of tokens: they end like names of secrets, and are none.
_HARMLESS = re.compile(
    r"(.*_)?(bos|eos|pad|unk|cls|sep|mask|stop|start|end|think|special|image|new|max|min|num|per|prompt|target)_tokens?"
)
# Keys and tokens of known services, by their prefixes.
_KNOWN = re.compile(
    r"(?<![A-Za-z0-9])(sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[a-z]-|AIza|npm_|pypi-|gsk_|nvapi-|r8_|SG\.|dckr_pat_)"
    r"(?=[\w.-]{0,200}[0-9A-Z])[\w.-]{8,}|(?<![A-Za-z0-9])(A[KS]IA)[A-Z0-9]{12,}|(?<![\w-])(eyJ)[\w-]{5,}\.[\w.-]+"
)
_PEM = re.compile(r"(-----BEGIN [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----).*?(-----END [A-Z0-9 ]*-----|\Z)", re.DOTALL)
_BEARER = re.compile(r"\b(Bearer|Basic(?=\s+\S*[0-9=]))(\s+)[\w.~+/=-]+")
_HEADER = re.compile(r"\b((?:proxy-)?authorization|(?:set-)?cookie)([\"']?:\s*[\"']?)[^\n\"']+", re.IGNORECASE)
_USER = re.compile(r"(?<=://)[^\s/?#\"'<>]*@")
# A name with its value: --api-key=x, api_key=x, {"api_key": "x"}, X-Api-Key: x.
_ASSIGNED = re.compile(
    r"(?<![\w-])((?:--)?[A-Za-z][\w-]{0,60})([\"']?\s{0,3}=\s{0,3}|[\"']\s{0,3}:\s{0,3}|:\s{1,3}|(?<=[a-z])\s)"
)
_VALUE = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'|[^\s\"'&;,)}\]]+")


def without_secrets(value: Json, name: str = "") -> Json:
    """Return a copy of `value` in which secrets are replaced by MASK.

    >>> without_secrets({"api_key": "sk-1234", "steps": 3})
    {'api_key': '***', 'steps': 3}

    Args:
        name: the dotted name of the value, of which each part is read; empty if it has none.
    """
    if value is None or (isinstance(value, str) and not value):
        return value

    # A text named `environment` may be the name of a simulated world, which is not a secret.
    *sections, last = name.split(".")
    is_last_place = _is_place(last) and (last == "env" or not isinstance(value, str))
    is_in_place = any(map(_is_place, sections)) or is_last_place

    if isinstance(value, dict):
        prefix = f"{name}." if name and (is_in_place or is_secret(last)) else ""
        return {key: without_secrets(item, f"{prefix}{key}") for key, item in value.items()}

    if isinstance(value, list | tuple):
        # In a command line the item after --api-key is its value: each item goes with the one before it.
        options = ["", *(item if isinstance(item, str) else "" for item in value)]
        item_name = f"{name}." if is_in_place else name  # makes the place one of the item's sections
        return [
            MASK if option.startswith("--") and is_secret(option) else without_secrets(item, item_name)
            for option, item in zip(options, value, strict=False)
        ]

    if is_in_place or any(map(is_secret, sections)):
        return MASK
    if is_secret(last) and not isinstance(value, bool):
        # A special token, such as <pad> or [PAD], is not a secret.
        return value if re.fullmatch(r"<[^<>\s]+>|\[[A-Z]+\]", str(value)) else MASK
    return mask_secrets(value) if isinstance(value, str) else value


def mask_secrets(text: str) -> str:
    """Return a text in which secrets are replaced by MASK: passwords of URLs, values of names such as `api_key`, keys.

    >>> mask_secrets("https://user:secret@host/x")
    'https://***@host/x'
    """
    # Values of this process's environment variables that are secrets by their names, longest first. PWD is the shell's
    # working directory.
    variables = ((name, value) for name, value in os.environ.items() if len(value) >= MIN_VALUE and name != "PWD")
    for secret in sorted((value for name, value in variables if is_secret(name)), key=len, reverse=True):
        text = text.replace(secret, MASK)

    for pattern, masked in (
        (_PEM, rf"\1{MASK}\2"),
        (_USER, f"{MASK}@"),
        (_BEARER, rf"\1\2{MASK}"),
        (_HEADER, rf"\1\2{MASK}"),
    ):
        text = pattern.sub(masked, text)
    text = _without_assigned(text)
    return _KNOWN.sub(lambda match: f"{match[match.lastindex or 0]}{MASK}", text)


def is_secret(name: str) -> bool:
    """Return whether a value of this name is a secret, judged by the name only.

    >>> is_secret("OPENAI_API_KEY")
    True
    >>> is_secret("tokens")
    False
    """
    words = "_".join(word.lower() for word in _WORDS.findall(name))
    return _NAME.fullmatch(words) is not None and _HARMLESS.fullmatch(words) is None


def masked_names(values: Json, name: str = "") -> Iterator[str]:
    """Yield the dotted names of the values in which `without_secrets` has replaced something by MASK.

    Args:
        values: what `without_secrets` returned.
        name: the dotted name of `values`; empty if it has none.

    >>> list(masked_names({"tracker": {"api_key": "***", "project": "x"}}))
    ['tracker.api_key']
    """
    if isinstance(values, dict):
        for key, item in values.items():
            yield from masked_names(item, f"{name}.{key}" if name else str(key))
    elif isinstance(values, list | tuple):
        for option, item in zip(["", *values], values, strict=False):
            is_option = isinstance(option, str) and option.startswith("--") and is_secret(option)
            yield from [name] if item == MASK and is_option else masked_names(item, name)
    # The user's own text may contain the characters of MASK. It was masked if a secret in their place would be masked.
    elif (
        isinstance(values, str)
        and MASK in values
        and without_secrets(values.replace(MASK, "Secret123"), name) == values
    ):
        yield name


def _is_place(name: str) -> bool:
    return _PLACES.fullmatch("_".join(word.lower() for word in _WORDS.findall(name))) is not None


def _without_assigned(text: str) -> str:
    """Mask the values that a text assigns to names of secrets: --api-key x, api_key=x, X-Api-Key: x.

    The search continues right after each name, so that assignments within the value of another name are found.

    >>> _without_assigned("steps=3 api_key=x1y2")
    'steps=3 api_key=***'
    """
    pieces = []
    position = 0
    while match := _ASSIGNED.search(text, position):
        name, separator = match.groups()
        pieces.append(text[position : match.end()])
        position = match.end()

        # A space separates only an option of a command line from its value.
        if not is_secret(name) or (separator.isspace() and not name.startswith("--")):
            continue

        # A word without digits after a colon is part of a sentence ("the key: none").
        value = _VALUE.match(text, position)
        is_word = separator[0] == ":" and value is not None and not re.search(r"[0-9]", value[0])
        if value is not None and not value[0].isdecimal() and not is_word:
            pieces.append(MASK)
            position = value.end()

    return "".join([*pieces, text[position:]])
