"""Secrets in what is shown or written down: by their place, by their name and by what they look like.

There is one mask for everything that leaves a run: its folder, trackers, model cards, reports, log lines and errors.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import Any, TextIO
from urllib.parse import unquote

MASK = "***"

# Mappings whose values are all hidden, and lists of them.
_ENVIRONMENT = {"env", "environ", "environment"}
_PLACES = re.compile(r"((^|_)env(ironment)?_var(iable)?s|(^|_)headers?|(^|_)cookies?)$")
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
# What makes a key or a token a harmless one, by the word before it.
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
# A path, a name or a kind of a secret is none.
_ABOUT = re.compile(
    "budget|column|columns|count|counts|dir|directory|enabled|env|field|file|files|folder|"
    "length|lengths|level|limit|mode|name|names|path|paths|per|position|ratio|required|size|"
    "type|url|variable|weight|weights"
)
_ABOUT_TOKENS = re.compile(_ABOUT.pattern + "|ids?|embeddings?|index|indices|logprobs|map|str|string")
# Of the query of an address.
_QUERY = re.compile(
    r"code|hmac|[jp]?(hp)?sess(ion)?_?id|policy|sid|sig|sign|signature|ticket|x-(amz|goog|oss|cos)-(signature|credential|security-token)"
    r"|awsaccesskeyid|googleaccessid|ossaccesskeyid"
)

_KNOWN = re.compile(
    r"(?<![A-Za-z0-9])(sk-|[srp]k_(?:live|test)_|hf_|gh[pousr]_|github_pat_|gl[a-z]+-|xox[a-z]-|xapp-|AIza|ya29\.|npm_|pypi-"
    r"|gsk_|nvapi-|r8_|SG\.|shp[a-z]+_|dckr_pat_|whsec_|dop_v1_|tskey-|hvs\.|figd_|lin_api_|tvly-|pplx-)"
    r"(?=[\w.-]{0,200}[0-9A-Z]|[\w.-]{20})[\w.-]{8,}"
    r"|(?<![A-Za-z0-9])(A[KS]IA|AGE-SECRET-KEY-1)[A-Z0-9]{12,}"
    r"|(?<![\w-])(csk-|fw_|key-|sk_|tgp_v1_|xai-)(?=[A-Za-z]*[0-9])[A-Za-z0-9]{16,}"
    r"|(hooks\.slack\.com/services/|discord(?:app)?\.com/api/webhooks/)[\w/-]+"
    r"|(?<![\w-])(eyJ)[\w-]{5,}\.[\w-]+(?:\.[\w-]*)*"
)
_PEM = re.compile(
    r"(-----BEGIN [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----).*?(-----END [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----|\Z)", re.DOTALL
)
_BEARER = re.compile(
    r"\b(Bearer|BEARER|bearer(?=\s+(?:\S{16}|\S*\d))|[Bb]asic(?=\s+\S*(?:[0-9=]|[a-z][A-Z])))(\s+)[\w.~+/=-]+"
)
# A quote may be part of a password; before a comma, a bracket or a space it ends the address.
_ADDRESS = re.compile(r"(?<=://)(?:[^\s\"'<>]|[\"'](?![\s,;:)\]}]|$))+")
_BARE_ADDRESS = re.compile(r"[\w.+-]+:[^\s/]+@(?!sha\d+:)[\w.-]+(:\d+)?(/\S*)?")
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
# What a name of several words may be followed by in a sentence is no secret.
_LOOKS = re.compile(r"(?=\S*[0-9])(?=\S*[A-Za-z])[^\s\"']{8,}")
_HEADERS = {"authorization", "cookie", "set-cookie", "password", "passwd", "passphrase", "api-key", "apikey", "api_key"}
# What partial masks leave; a mask alone shows by its place or name.
_LEFT = re.compile(
    rf"(?:://|[\w.%\[\]-]\s?=\s?|Bearer\s|/services/|/webhooks/|sk-|hf_|gh[pousr]_"
    rf"|A[KS]IA|eyJ|KEY[A-Z ]*-----){re.escape(MASK)}"
)


def without_secrets(value: Any, name: str = "") -> Any:
    """Plain data in which secrets are `MASK`: those of environment variables and headers, of names such as `api_key`,
    and texts that look like one.

    Args:
        name: the key of the value, if it has one; dotted names are read part by part.
    """
    *sections, last = name.split(".")
    if any(_is_place(section, {}) or is_secret(section) for section in sections) or _is_place(last, value):
        return _hidden(value)
    if isinstance(value, dict):
        if is_secret(last):
            return {key: item if _is_harmless(item, last) else _hidden(item) for key, item in value.items()}
        title = next((value[key] for key in ("name", "key", "header") if isinstance(value.get(key), str)), "")
        return {
            key: without_secrets(item, title if key == "value" and is_secret(title) else str(key))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        options = ["", *(item if isinstance(item, str) else "" for item in value)]
        return [
            MASK if isinstance(item, str) and _is_option(before) else without_secrets(item, name)
            for before, item in zip(options, value, strict=False)
        ]
    if is_secret(last) and not _is_harmless(value, last):
        return _hidden(value)
    if not isinstance(value, str):
        return value
    if value[:1] in ("{", "[") and (parsed := _parsed(value)) is not None:
        shown = without_secrets(parsed)
        return value if shown == parsed else json.dumps(shown)
    # In a message, unlike in a command, the word after an option may be any.
    return masked(_OPTION.sub(lambda m: f"{m[1]}{m[2]}{m[3]}{_told(m[2], m[4])}", value))


def masked(text: str) -> str:
    """A text without the secrets in it: passwords of addresses, values of names such as `api_key`, keys, tokens."""
    if _BARE_ADDRESS.fullmatch(text) and "://" not in text:
        return f"{MASK}@{text.rpartition('@')[2]}"
    text = _PEM.sub(rf"\1{MASK}\2", text)
    text = _ADDRESS.sub(lambda m: "://".join(map(_without_user, m[0].split("://"))), text)
    text = _BEARER.sub(rf"\1\2{MASK}", text)
    text = _without_assigned(text)
    text = _QUOTED.sub(lambda m: f"{m[1]}{m[2]}{m[1]}{m[3]}{_told(m[2], m[4])}", text)
    text = _HEADER.sub(lambda m: f"{m[1]}{m[2]}{_told_in_line(m[1], m[3])}", text)
    text = _PROGRAM.sub(rf"\1{MASK}", text)
    return _KNOWN.sub(lambda m: f"{m[m.lastindex or 0]}{MASK}", text)


class MaskedStream(io.TextIOBase):
    """A stream on which whole lines are written without their secrets."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._line = stream, ""

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
        """Of the stream below."""
        return self._stream.fileno()


def is_secret(name: str) -> bool:
    """Whether what has this name is a secret, as far as a name can say."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words:
        return False
    if _TOGETHER.fullmatch("_".join(words)):
        return True
    for at, word in enumerate(words):
        before, rest = words[at - 1] if at else "", words[at + 1 :]
        about = bool(rest) and bool(_ABOUT.fullmatch(rest[-1]))
        if _ALWAYS.fullmatch(word) and not about:
            return True
        if word in ("key", "keys") and not _KEYS.fullmatch(before) and (not rest or (before and not about)):
            return not (rest and rest[0] in ("value", "values", "frame", "frames", "word", "words", "error", "press"))
        if word in ("token", "tokens") and not _TOKENS.fullmatch(before):
            if word == "tokens" and before and not _PLURAL.fullmatch(before):
                continue
            if not rest or (before and not _ABOUT_TOKENS.fullmatch(rest[-1]) and _PLURAL.fullmatch(before)):
                return True
        if word == "auth" and not about and not (rest and rest[-1] in ("method", "scheme", "provider", "server")):
            return True
    return False


def masked_names(values: Any, name: str = "") -> Iterator[str]:
    """Dotted names of the values of plain data that a mask has replaced, in whole or in part."""
    if isinstance(values, dict):
        for key, item in values.items():
            yield from masked_names(item, f"{name}.{key}" if name else str(key))
    elif isinstance(values, list | tuple):
        for before, item in zip(["", *values], values, strict=False):
            if item == MASK and isinstance(before, str) and _is_option(before):
                yield name
            else:
                yield from masked_names(item, name)
    elif isinstance(values, str) and MASK in values:
        whole = values == MASK and without_secrets("x", name) == MASK
        if whole or _LEFT.search(values) or values.startswith(f"{MASK}@"):
            yield name


def _is_place(name: str, value: Any) -> bool:
    """Whether all values of a mapping or list of this name are hidden. An environment may also be one to act in, which
    is given by its name."""
    words = "_".join(word.lower() for word in _WORDS.findall(name))
    if _PLACES.search(words) or words == "env":
        return True
    if not isinstance(value, dict | list):
        return False
    if words in _ENVIRONMENT:
        return True
    keys = list(value) if isinstance(value, dict) else []
    return words.endswith("_env") and bool(keys) and all(_VARIABLE.fullmatch(str(key)) for key in keys)


def _parsed(text: str) -> Any:
    """The data that a text of JSON is; None: it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _hidden(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _hidden(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(item) for item in value]
    return value if value is None or value == "" else MASK


def _is_harmless(value: Any, name: str) -> bool:
    """Whether a value is none that a secret has: a switch, a number of tokens, a special token."""
    if isinstance(value, bool):
        return True
    if isinstance(value, int | float):
        return name.lower().endswith(("tokens", "keys"))
    return isinstance(value, str) and re.fullmatch(r"<[^<>\s]+>|\[[A-Z]+\]", value) is not None


def _is_option(text: str) -> bool:
    """Whether the next word of a command line is the value of a secret."""
    return text.startswith("-") and "=" not in text and _told(text.lstrip("-"), "x") == MASK


def _told(name: str, value: str) -> str:
    """The value of a name in a text."""
    *sections, last = name.split(".")
    if any(_is_place(section, {}) for section in [*sections, last]):
        return MASK
    return MASK if is_secret(last) and not _is_harmless(value, last) and not value.isdecimal() else value


def _told_in_line(name: str, value: str) -> str:
    """The rest of a line after a name and a colon, as in a header, YAML or a sentence."""
    if name.lower() in _HEADERS | {"x-api-key"}:
        return MASK
    bare = value.strip().rstrip(",;)}]")
    looks = _LOOKS.fullmatch(bare) is not None and MASK not in bare
    return value.replace(bare, MASK) if looks and is_secret(name) and name.lower() not in ("key", "keys") else value


def _without_assigned(text: str) -> str:
    """A text in which what is assigned to names of secrets is masked; also within what is assigned to others."""
    parts, at = [], 0
    while name := _ASSIGNED.search(text, at):
        parts.append(text[at : name.end()])
        at = name.end()
        if _is_told(name[1], unquote(name[2]), text[at : at + 80]) and (value := _VALUE.match(text, at)):
            query = bool(name[1]) and _QUERY.fullmatch(unquote(name[2]).lower()) is not None
            parts.append(MASK if query else _told(unquote(name[2]), value[0]))
            at = value.end()
    return "".join([*parts, text[at:]])


def _is_told(mark: str, name: str, start: str) -> bool:
    """Whether what is assigned to a name may be a secret; `start` is that of what is assigned."""
    plain = name.lower()
    if mark and _QUERY.fullmatch(plain):
        return True
    if not mark and plain.rpartition(".")[2] in ("key", "keys", "token", "tokens"):  # of a program's text
        return start[:1] in ("'", '"') and _LOOKS.match(start, 1) is not None
    return _told(name, "x") == MASK


def _without_user(address: str) -> str:
    """An address, from its host on, without user and password. A password may hold the @ and / that it should not."""
    _, at, host = address.rpartition("@")
    authority = re.split("[/?#]", address, maxsplit=1)[0]
    return f"{MASK}@{host}" if at and ("@" in authority or ":" in authority) else address
