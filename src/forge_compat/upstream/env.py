"""`forge.env` of torchforge: its environment variables. The description of each says what it does here."""

from __future__ import annotations

import os
from dataclasses import dataclass

Value = bool | int | float | str | None


@dataclass
class EnvVar:
    """An environment variable: its name, the value without it, and what it does."""

    name: str
    default: Value
    description: str

    def get_value(self) -> Value:
        """The variable as a value of its default's type; the default if it is not set."""
        text = os.environ.get(self.name)
        if text is None:
            return self.default
        if isinstance(self.default, bool):
            return text.lower() in ("true", "1", "yes")
        return type(self.default)(text) if isinstance(self.default, int | float) else text


DISABLE_PERF_METRICS = EnvVar("DISABLE_PERF_METRICS", False, "Tracer and trace record nothing.")
METRIC_TIMER_USES_GPU = EnvVar(
    "METRIC_TIMER_USES_GPU", None, "The timer of Tracer and trace: true is gpu, false is cpu; unset: their argument."
)
FORGE_DISABLE_METRICS = EnvVar(
    "FORGE_DISABLE_METRICS", False, "Not used: a recipe needs its metrics, and no logger is spawned for them."
)
MONARCH_STDERR_LEVEL = EnvVar("MONARCH_STDERR_LOG", "warning", "Monarch's own: the level of its messages.")
RUST_BACKTRACE = EnvVar("RUST_BACKTRACE", "full", "Rust's own: the traces of its panics.")
MONARCH_MESSAGE_DELIVERY_TIMEOUT = EnvVar(
    "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT_SECS", 600, "Monarch's own: seconds until a message is undeliverable."
)
MONARCH_MAX_FRAME_LENGTH = EnvVar("HYPERACTOR_CODE_MAX_FRAME_LENGTH", 1 << 30, "Monarch's own: bytes of a message.")
TORCHSTORE_USE_RDMA = EnvVar("TORCHSTORE_RDMA_ENABLED", 1, "Of TorchStore's package, with cluster.store torchstore.")


def all_env_vars() -> list[EnvVar]:
    """All of these variables."""
    return [value for value in globals().values() if isinstance(value, EnvVar)]
