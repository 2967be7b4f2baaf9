"""The settings with which a session of the gateway is opened, and how its clients reach it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Limits of one session in addition to the configured ones, far above what clients need.
MAX_OPEN = 16  # requests that may be open at once
MAX_BODY = 8 << 20  # bytes of a request
TOKEN_LENGTH = 32  # characters of a token, at most on average: a text that is longer is not tokenised to count


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """The limits of one session, and how its turns are sampled.

    name: identifies the session in logs and errors; the turns' seeds depend on it and on `seed`.
    seed: the seed from which the turns' seeds are drawn.
    max_turns: the limit for the number of answers of all policies together.
    max_tokens: the limit for the tokens of one conversation, both read and sampled.
    max_prompt: the tokens that the policies take at most; None: `max_tokens`.
    max_turn_tokens: the limit for the tokens of one answer; None: as many as the conversation has left.
    seconds: the time from the session's opening on, after which every answer is empty.
    max_open: the number of requests that may be open at once.
    is_served: whether the clients belong to a server, not to an episode: their sampling settings are used, and an
        answer is cancelled when its client disconnects.
    sampling: fields of `forge.types.Sampling` that override the policies' settings, such as in an evaluation.
    """

    name: str = ""
    seed: int = 0
    max_turns: int = 64
    max_tokens: int = 4096
    max_prompt: int | None = None
    max_turn_tokens: int | None = None
    seconds: float = 3600.0
    max_open: int = MAX_OPEN
    is_served: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Access:
    """How a client reaches its session: the base URL without `/v1`, and the API key, which identifies the session."""

    url: str
    key: str
