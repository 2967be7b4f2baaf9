"""Checks of names, hosts and words for launchers, so that none is read as another line, option or command."""

from __future__ import annotations

import re
from collections.abc import Iterable

import yaml

# Words that need no quotes in YAML.
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
# Words that YAML parsers other than Python's read as something else than text.
_AMBIGUOUS = re.compile(r"y|n|yes|no|on|off|true|false|null|nan|inf", re.IGNORECASE)


class _Dumper(yaml.SafeDumper):
    """Writes text so that every parser of YAML reads it as text: Go's reads 1e-6 as a number, Python's does not."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represented(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(text) and not _AMBIGUOUS.fullmatch(text)
    lines = text.split("\n")
    # Several lines are written as a block, which is easier to read, if no line needs an escape.
    block = (
        len(lines) > 1 and all(line.isprintable() and line == line.rstrip() for line in lines) and lines[0][:1].strip()
    )
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else "|" if block else '"')


_Dumper.add_representer(str, _represented)


def documents(values: Iterable[object]) -> str:
    """Write plain data as documents of YAML."""
    return yaml.dump_all(values, Dumper=_Dumper, sort_keys=False, width=1 << 20)


def check_words(words: Iterable[str]) -> None:
    """Raise ValueError for a word that is not valid as an argument: it has a NUL, or half a character."""
    for word in words:
        if "\0" in word or (not word.isascii() and not _encodes(word)):
            raise ValueError(f"{word[:80]!a} cannot be a word of a command: it has a NUL or half a character")


def _encodes(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_host(host: str) -> None:
    """Raise ValueError for a host that ssh would read as an option, or that a ProxyCommand would pass to a shell."""
    allowed = re.fullmatch(r"(ssh://)?([\w.+][\w.+-]*@)?(\[[\w:.%]+\]|[\w.:%][\w.:%-]*)", host, re.ASCII)
    if allowed is None or len(host) > 255:
        raise ValueError(f"{host[:80]!a} cannot be a host of --hosts: write name, user@name or an address")
