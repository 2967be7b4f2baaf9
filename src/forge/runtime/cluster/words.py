"""Names, hosts and words as launchers may hand them on: none is another line, option or command there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
# What parsers of YAML other than Python's take for no text.
_OTHER = re.compile(r"y|n|yes|no|on|off|true|false|null|nan|inf", re.IGNORECASE)


class _Dumper(yaml.SafeDumper):
    """Writes text so that every parser of YAML reads it as that: Go's takes 1e-6 for a number, Python's does not."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represented(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(text) and not _OTHER.fullmatch(text)
    lines = text.split("\n")
    block = (
        len(lines) > 1 and all(line.isprintable() and line == line.rstrip() for line in lines) and lines[0][:1].strip()
    )
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else "|" if block else '"')


_Dumper.add_representer(str, _represented)


def documents(values: Iterable[Any]) -> str:
    """Plain data as documents of YAML."""
    return yaml.dump_all(values, Dumper=_Dumper, sort_keys=False, width=1 << 20)


def check_words(words: Iterable[str]) -> None:
    """ValueError: a word that no program can be given: it has a NUL, or half a character."""
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
    """ValueError: what ssh would take for an option, or hand to a shell by a ProxyCommand."""
    allowed = re.fullmatch(r"(ssh://)?([\w.+][\w.+-]*@)?(\[[\w:.%]+\]|[\w.:%][\w.:%-]*)", host, re.ASCII)
    if allowed is None or len(host) > 255:
        raise ValueError(f"{host[:80]!a} cannot be a host of --hosts: write name, user@name or an address")
