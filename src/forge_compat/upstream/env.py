"""`forge.env` of torchforge: its environment variables, of which most do nothing here."""

import os
from dataclasses import dataclass

Value = bool | int | float | str | None


@dataclass
class EnvVar:
    """Environment variable: its name, its default value and its effect in forge."""

    name: str
    default: Value
    description: str

    def get_value(self) -> Value:
        """Return the variable as a value of its default's type; the default if it is not set."""
        text = os.environ.get(self.name)
        if text is None:
            return self.default
        if isinstance(self.default, bool):
            return text.lower() in ("true", "1", "yes")
        return type(self.default)(text) if isinstance(self.default, int | float) else text


DISABLE_PERF_METRICS = EnvVar("DISABLE_PERF_METRICS", False, "Tracer and trace record nothing.")
FORGE_DISABLE_METRICS = EnvVar("FORGE_DISABLE_METRICS", False, "Nothing: metrics are always recorded.")
METRIC_TIMER_USES_GPU = EnvVar("METRIC_TIMER_USES_GPU", None, "The timer of Tracer, not its argument.")
MONARCH_STDERR_LEVEL = EnvVar("MONARCH_STDERR_LOG", "warning", "Monarch's own level of messages.")
RUST_BACKTRACE = EnvVar("RUST_BACKTRACE", "full", "Monarch's own traces.")
MONARCH_MESSAGE_DELIVERY_TIMEOUT = EnvVar("HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT_SECS", 600, "Monarch's own, in seconds.")
MONARCH_MAX_FRAME_LENGTH = EnvVar("HYPERACTOR_CODE_MAX_FRAME_LENGTH", 1 << 30, "Monarch's own, in bytes.")
TORCHSTORE_USE_RDMA = EnvVar("TORCHSTORE_RDMA_ENABLED", 1, "Nothing: there is no choice of a transport.")


def all_env_vars() -> list[EnvVar]:
    """Return all environment variables of torchforge."""
    return [value for value in globals().values() if isinstance(value, EnvVar)]
