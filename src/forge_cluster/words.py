"""Checks of names, hosts and words for launchers, so that none is read as another line, option or command."""

from __future__ import annotations

import re
from collections.abc import Iterable


def check_words(words: Iterable[str]) -> None:
    """Raise ValueError for a word that is not valid as an argument: it has a NUL, or half a character."""
    for word in words:
        if re.search("[\0\ud800-\udfff]", word):
            raise ValueError(f"{word[:80]!a} cannot be a word of a command: it has a NUL or half a character")


def check_host(host: str) -> None:
    """Raise ValueError for a host that ssh would read as an option, or that a ProxyCommand would pass to a shell."""
    allowed = re.fullmatch(r"(ssh://)?([\w.+][\w.+-]*@)?(\[[\w:.%]+\]|[\w.:%][\w.:%-]*)", host, re.ASCII)
    if allowed is None or len(host) > 255:
        raise ValueError(f"{host[:80]!a} cannot be a host of --hosts: write name, user@name or an address")
