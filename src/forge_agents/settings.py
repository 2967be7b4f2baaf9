"""Limits of a session, and what a caller states when it opens one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Limits of one session alongside the configured ones, far above what clients need.
MAX_OPEN = 16  # requests at once
MAX_BODY = 8 << 20  # bytes of a request


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What one episode may use.

    name: for logs and errors.
    seed: of what the policies draw.
    max_turns: answers of all policies together.
    max_tokens: of one conversation, with what the policy reads.
    max_turn_tokens: of one answer; None: as many as are left.
    seconds: from its opening on, after which every answer is empty.
    max_open: requests at once.
    is_served: the clients belong to a server, not to an episode: their settings of sampling hold, and an answer that
        all its readers have left is cancelled.
    sampling: fields of `forge.types.Sampling` that differ from the policies' settings, such as in an evaluation.
    """

    name: str = ""
    seed: int = 0
    max_turns: int = 64
    max_tokens: int = 4096
    max_turn_tokens: int | None = None
    seconds: float = 3600.0
    max_open: int = MAX_OPEN
    is_served: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Access:
    """How a client reaches its session: the base URL without `/v1`, and the key, which is the session's secret."""

    url: str
    key: str
