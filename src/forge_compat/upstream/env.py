"""`forge.env` of torchforge: those of its environment variables that do something here."""

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


def all_env_vars() -> list[EnvVar]:
    """All of these variables."""
    return [value for value in globals().values() if isinstance(value, EnvVar)]
