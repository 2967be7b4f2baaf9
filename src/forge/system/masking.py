"""Masks for secrets in all that is shown or written, by their place, their name and their appearance.

There is one mask for everything that leaves a run: its folder, trackers, model cards, reports, log lines and errors.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import Any, TextIO
from urllib.parse import unquote

Json = Any  # plain data, as of a configuration


MASK = "***"

# Mappings whose values are all hidden, and lists of them.
_ENVIRONMENT = {"env", "environ", "environment"}
_PLACES = re.compile(r"((^|_)env(ironment)?_var(iable)?s|(^|_)headers?|(^|_)cookies?)$")
# A name as environment variables have it.
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")

# A name is read in words: api-key, apiKey and API_KEY are two, apikey is one.
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_ALWAYS = re.compile(
    r"authorization|bearers?|cookies?|cred(ential)?s?|dsn|jwts?|pass(code|phrase|wd|word|wort)s?|passwort|pwd?|secrets?"
    r"|[a-z]*(api|access|account|private|secret)keys?|(app|auth|client|encryption|master|service|shared|signing|ssh)keys?"
    r"|(access|api|auth|bearer|bot|csrf|hf|hub|id|oauth|refresh|sas|session|user|xsrf)tokens?"
    r"|(auth|client|user|db)(secret|pass|pwd)s?|[a-z]+passw(or)?ds?|[a-z]+secrets?|oauth2?|connectionstring"
    r"|(anthropic|azure|cohere|google|hf|mistral|openai|wandb)keys?|t?otp|pgpass|mnemonic"
)
_TOGETHER = re.compile(
    r"pass|(.*_)?((db|http|login|mail|proxy|root|smtp|user)_pass|conn(ection)?_str(ing)?|seed_phrase|sas(_url)?"
    r"|(azure|bitbucket|github|gitlab|personal)_pat|webhook(_url)?|service_account_json)"
)
# Words before "key" or "token" that make it a harmless one.
_KEYS = re.compile(
    "answer|attention|batch|cache|column|config|data|dict|dictionary|entry|feature|field|fn|"
    "foreign|function|group|hash|image|index|input|item|json|label|lookup|map|mapping|message|"
    "messages|metadata|metric|misspelt|monitor|num|number|of|output|partition|per|primary|prompt|"
    "public|query|question|response|reward|routing|row|score|shard|shortcut|sort|state|step|"
    "target|text|unique|unknown|value|yaml"
)
_TOKENS = re.compile(
    "added|additional|assistant|audio|bad|batch|begin|bos|cls|code|completion|context|count|"
    "decode|decoded|decoder|draft|empty|end|eos|eot|extra|fim|first|forced|generated|generation|"
    "ids|image|input|last|length|mask|max|mean|min|model|n|new|next|no|num|number|of|output|"
    "pad|padding|per|placeholder|prefill|prefix|prompt|reasoning|reserved|response|seen|sep|"
    "separator|separators|special|speculative|start|stop|sub|suppress|target|text|think|thinking|"
    "thought|tool|total|train|trained|turn|unk|unknown|video|vision|word"
)
_PLURAL = re.compile(
    "access|api|app|auth|bearer|bot|client|github|gitlab|hf|hub|login|oauth|personal|refresh|secret|session|user"
)
# Words after the name of a secret: its path, its name or its kind is not secret.
_ABOUT = re.compile(
    "budget|column|columns|count|counts|dir|directory|enabled|env|field|file|files|folder|"
    "length|lengths|level|limit|mode|name|names|path|paths|per|position|ratio|required|size|"
    "type|url|variable|weight|weights"
)
_ABOUT_TOKENS = re.compile(_ABOUT.pattern + "|ids?|embeddings?|index|indices|logprobs|map|str|string")
# Names in the query of an address.
_QUERY = re.compile(
    r"code|hmac|[jp]?(hp)?sess(ion)?_?id|policy|sid|sig|sign|signature|ticket|x-(amz|goog|oss|cos)-(signature|credential|security-token)"
    r"|awsaccesskeyid|googleaccessid|ossaccesskeyid"
)

# Keys and tokens of services, which are known by how they begin.
_KNOWN = re.compile(
    r"(?<![A-Za-z0-9])(sk-|[srp]k_(?:live|test)_|hf_|gh[pousr]_|github_pat_|gl[a-z]+-|xox[a-z]-|xapp-|AIza|ya29\.|npm_|pypi-"
    r"|gsk_|nvapi-|r8_|SG\.|shp[a-z]+_|dckr_pat_|whsec_|dop_v1_|tskey-|hvs\.|figd_|lin_api_|tvly-|pplx-)"
    r"(?=[\w.-]{0,200}[0-9A-Z]|[\w.-]{20})[\w.-]{8,}"
    r"|(?<![A-Za-z0-9])(A[KS]IA|AGE-SECRET-KEY-1)[A-Z0-9]{12,}"
    r"|(?<![\w-])(csk-|fw_|key-|sk_|tgp_v1_|xai-)(?=[A-Za-z]*[0-9])[A-Za-z0-9]{16,}"
    r"|(hooks\.slack\.com/services/|discord(?:app)?\.com/api/webhooks/)[\w/-]+"
    r"|(?<![\w-])(eyJ)[\w-]{5,}\.[\w-]+(?:\.[\w-]*)*"
)
# A private key in a text file.
_PEM = re.compile(
    r"(-----BEGIN [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----).*?(-----END [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----|\Z)", re.DOTALL
)
# After the word of an HTTP header; a sentence may have the same word in small letters.
_BEARER = re.compile(
    r"\b(Bearer|BEARER|bearer(?=\s+(?:\S{16}|\S*\d))|[Bb]asic(?=\s+\S*(?:[0-9=]|[a-z][A-Z])))(\s+)[\w.~+/=-]+"
)
# A quote may be part of a password; before a comma, a bracket or a space it ends the address.
_ADDRESS = re.compile(r"(?<=://)(?:[^\s\"'<>]|[\"'](?![\s,;:)\]}]|$))+")
# user:password@host without a scheme; the name of an image with its digest is none.
_BARE_ADDRESS = re.compile(r"[\w.+-]+:[^\s/]+@(?!sha\d+:)[\w.-]+(:\d+)?(/\S*)?")
# Names with their values: as an option, an assignment, in quotes, and in a header or YAML.
_OPTION = re.compile(r"(--?)([A-Za-z][\w.-]{0,99})([ =]+)(\"[^\"]*\"|'[^']*'|\{[^}]*\}?|[^\s-]\S*)")
_ASSIGNED = re.compile(r"([?&;#]?)(?<![\w%.\[\]-])((?:--?)?[A-Za-z%][\w.%\[\]-]{0,99})\s{0,9}=\s{0,9}")
_VALUE = re.compile(r"\"[^\"]*\"|'[^']*'|[^\s\"'<>&;#,)}\]]+")
_QUOTED = re.compile(r"([\"'])([A-Za-z][\w. -]{0,60})\1(\s*:\s*)(\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*')")
_HEADER = re.compile(r"(?<![\w-])([A-Za-z][\w-]{0,60})(:\s+)(?![\"'])(\S[^\n\"']*)")
# Passwords among the words of a program.
_PROGRAM = re.compile(
    r"(\bsshpass\s+-p\s*|\bmy(?:sql|sqldump|sqladmin)\s(?:[^\n]{0,200}\s)?-p|\blogin\s+\S+\s+password\s+"
    r"|(?<!\S)(?:-[uU]|--user|--proxy-user)[ =]?(?!\d+:\d+(?!\S))[\w.@+-]+:)\S+"
)
# The appearance of a secret after a name and a colon; in a sentence a word follows instead.
_LOOKS = re.compile(r"(?=\S*[0-9])(?=\S*[A-Za-z])[^\s\"']{8,}")
_HEADERS = {"authorization", "cookie", "set-cookie", "password", "passwd", "passphrase", "api-key", "apikey", "api_key"}
# The remains of partially masked texts; a mask alone is recognised by its place or name.
_REMAINS = re.compile(
    rf"(?:://|[\w.%\[\]-]\s?=\s?|Bearer\s|/services/|/webhooks/|sk-|hf_|gh[pousr]_"
    rf"|A[KS]IA|eyJ|KEY[A-Z ]*-----){re.escape(MASK)}"
)


def without_secrets(value: Json, name: str = "") -> Json:
    """Return plain data in which secrets are `MASK`: those of environment variables and headers, of names such as
    `api_key`, and texts that look like one.

    Args:
        name: the key of the value, if it has one; dotted names are read part by part.
    """
    *sections, last = name.split(".")
    if any(_is_place(section, {}) or is_secret(section) for section in sections) or _is_place(last, value):
        return _mask_all(value)
    # A mapping such as {name: api_key, value: ...} has the name of its value beside it.
    if isinstance(value, dict):
        if is_secret(last):
            return {key: item if _is_harmless(item, last) else _mask_all(item) for key, item in value.items()}
        title = next((value[key] for key in ("name", "key", "header") if isinstance(value.get(key), str)), "")
        return {
            key: without_secrets(item, title if key == "value" and is_secret(title) else str(key))
            for key, item in value.items()
        }
    # In a command line the word after --api-key is its value.
    if isinstance(value, list | tuple):
        options = ["", *(item if isinstance(item, str) else "" for item in value)]
        return [
            MASK if isinstance(item, str) and _is_option(option) else without_secrets(item, name)
            for option, item in zip(options, value, strict=False)
        ]
    if is_secret(last) and not _is_harmless(value, last):
        return _mask_all(value)
    if not isinstance(value, str):
        return value
    # JSON within a text, as of an environment variable, is read as data.
    if value[:1] in ("{", "["):
        parsed = _parse(value)
        if parsed is not None:
            masked_data = without_secrets(parsed)
            return value if masked_data == parsed else json.dumps(masked_data)
    # In a message, unlike in a command, the word after an option may be any.
    return masked(_OPTION.sub(lambda m: f"{m[1]}{m[2]}{m[3]}{_mask_value(m[2], m[4])}", value))


def masked(text: str) -> str:
    """Mask the secrets in a text: passwords of addresses, values of names such as `api_key`, keys, tokens."""
    if _BARE_ADDRESS.fullmatch(text) and "://" not in text:
        return f"{MASK}@{text.rpartition('@')[2]}"
    text = _PEM.sub(rf"\1{MASK}\2", text)
    text = _ADDRESS.sub(lambda m: "://".join(map(_without_user, m[0].split("://"))), text)
    text = _BEARER.sub(rf"\1\2{MASK}", text)
    text = _without_assigned(text)
    text = _QUOTED.sub(lambda m: f"{m[1]}{m[2]}{m[1]}{m[3]}{_mask_value(m[2], m[4])}", text)
    text = _HEADER.sub(lambda m: f"{m[1]}{m[2]}{_mask_line(m[1], m[3])}", text)
    text = _PROGRAM.sub(rf"\1{MASK}", text)
    return _KNOWN.sub(lambda m: f"{m[m.lastindex or 0]}{MASK}", text)


class MaskedStream(io.TextIOBase):
    """A stream that writes whole lines without their secrets."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._line = ""

    def write(self, text: str) -> int:
        """Write the lines that are complete."""
        *lines, self._line = (self._line + text).split("\n")
        self._stream.write("".join(f"{masked(line)}\n" for line in lines))
        return len(text)

    def flush(self) -> None:
        """Write the last line, which has no end yet."""
        self._stream.write(masked(self._line))
        self._line = ""
        self._stream.flush()

    def fileno(self) -> int:
        """File descriptor of the underlying stream."""
        return self._stream.fileno()


def is_secret(name: str) -> bool:
    """Whether the value of this name is a secret, as far as a name can tell."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words:
        return False
    if _TOGETHER.fullmatch("_".join(words)):
        return True
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        after = words[index + 1 :]
        about = bool(after) and bool(_ABOUT.fullmatch(after[-1]))
        if _ALWAYS.fullmatch(word) and not about:
            return True
        if word in ("key", "keys") and not _KEYS.fullmatch(before) and (not after or (before and not about)):
            return not (after and after[0] in ("value", "values", "frame", "frames", "word", "words", "error", "press"))
        if word in ("token", "tokens") and not _TOKENS.fullmatch(before):
            # "tokens" are mostly a number of them, unless the word before names a service.
            if word == "tokens" and before and not _PLURAL.fullmatch(before):
                continue
            if not after or (before and not _ABOUT_TOKENS.fullmatch(after[-1]) and _PLURAL.fullmatch(before)):
                return True
        if word == "auth" and not about and not (after and after[-1] in ("method", "scheme", "provider", "server")):
            return True
    return False


def masked_names(values: Json, name: str = "") -> Iterator[str]:
    """Yield the dotted names of values that a mask has replaced, entirely or in part."""
    if isinstance(values, dict):
        for key, item in values.items():
            yield from masked_names(item, f"{name}.{key}" if name else str(key))
    elif isinstance(values, list | tuple):
        for option, item in zip(["", *values], values, strict=False):
            if item == MASK and isinstance(option, str) and _is_option(option):
                yield name
            else:
                yield from masked_names(item, name)
    elif isinstance(values, str) and MASK in values:
        is_masked = values == MASK and without_secrets("x", name) == MASK
        if is_masked or _REMAINS.search(values) or values.startswith(f"{MASK}@"):
            yield name


def _is_place(name: str, value: Json) -> bool:
    """Whether all values of a mapping or list of this name are hidden. An environment may also be a simulated world,
    which is a name and not a mapping."""
    words = "_".join(word.lower() for word in _WORDS.findall(name))
    if _PLACES.search(words) or words == "env":
        return True
    if not isinstance(value, dict | list):
        return False
    if words in _ENVIRONMENT:
        return True
    keys = list(value) if isinstance(value, dict) else []
    return words.endswith("_env") and bool(keys) and all(_VARIABLE.fullmatch(str(key)) for key in keys)


def _parse(text: str) -> Json:
    """Parse a text as JSON; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _mask_all(value: Json) -> Json:
    if isinstance(value, dict):
        return {key: _mask_all(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mask_all(item) for item in value]
    return value if value is None or value == "" else MASK


def _is_harmless(value: Json, name: str) -> bool:
    """Whether a value cannot be a secret: a switch, a number of tokens, a special token."""
    if isinstance(value, bool):
        return True
    if isinstance(value, int | float):
        return name.lower().endswith(("tokens", "keys"))
    return isinstance(value, str) and re.fullmatch(r"<[^<>\s]+>|\[[A-Z]+\]", value) is not None


def _is_option(text: str) -> bool:
    """Whether the next word of a command line is the value of a secret."""
    return text.startswith("-") and "=" not in text and _mask_value(text.lstrip("-"), "x") == MASK


def _mask_value(name: str, value: str) -> str:
    """Mask a value in a text, if its name is that of a secret."""
    *sections, last = name.split(".")
    if any(_is_place(section, {}) for section in [*sections, last]):
        return MASK
    return MASK if is_secret(last) and not _is_harmless(value, last) and not value.isdecimal() else value


def _mask_line(name: str, value: str) -> str:
    """Mask the text after a name and a colon, as in a header, YAML or a sentence."""
    if name.lower() in _HEADERS | {"x-api-key"}:
        return MASK
    candidate = value.strip().rstrip(",;)}]")
    looks_secret = _LOOKS.fullmatch(candidate) is not None and MASK not in candidate
    is_named = is_secret(name) and name.lower() not in ("key", "keys")
    return value.replace(candidate, MASK) if looks_secret and is_named else value


def _without_assigned(text: str) -> str:
    """Mask the values that are assigned to names of secrets, also within the values of other names."""
    parts = []
    position = 0
    while name := _ASSIGNED.search(text, position):
        parts.append(text[position : name.end()])
        position = name.end()
        # The value is matched for names of secrets alone: it may be all the rest of a long text.
        if not _may_assign_secret(name[1], unquote(name[2]), text[position : position + 80]):
            continue
        value = _VALUE.match(text, position)
        if value:
            query = bool(name[1]) and _QUERY.fullmatch(unquote(name[2]).lower()) is not None
            parts.append(MASK if query else _mask_value(unquote(name[2]), value[0]))
            position = value.end()
    return "".join([*parts, text[position:]])


def _may_assign_secret(mark: str, name: str, start: str) -> bool:
    """Whether the value that is assigned to a name may be a secret; `start` is the beginning of the value."""
    plain = name.lower()
    if mark and _QUERY.fullmatch(plain):
        return True
    if not mark and plain.rpartition(".")[2] in ("key", "keys", "token", "tokens"):  # in the text of a program
        return start[:1] in ("'", '"') and _LOOKS.match(start, 1) is not None
    return _mask_value(name, "x") == MASK


def _without_user(address: str) -> str:
    """Mask user and password of an address without its scheme. A password may contain @ and /, though it should not."""
    _, separator, host = address.rpartition("@")
    authority = re.split("[/?#]", address, maxsplit=1)[0]
    return f"{MASK}@{host}" if separator and ("@" in authority or ":" in authority) else address
