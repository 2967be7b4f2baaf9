"""Settings of the generation engines: the `generator` section of a configuration. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt

from ..config import Section


class EngineSettings(Section):
    """The generation engine ([engines.md](engines.md))."""

    engine: Literal["embedded", "vllm"] = "embedded"
    """`embedded` is plain PyTorch; `vllm` needs an environment with vLLM."""
    slots: PositiveInt = 256
    """Sequences decoded at once."""
    max_seq_len: int | None = Field(None, ge=2)
    """Most tokens of prompt and completion together; null: the model's limit, at most 4096."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and cache."""
    on_update: Literal["continue", "finish", "recompute"] = "continue"
    """Running sequences at a weight update: they `continue` under the new weights with the keys and values
    they have, `finish` under the old ones first, or `recompute` keys and values under the new ones
    ([weights.md](weights.md))."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's engine, by their names there."""

    def _check(self) -> None:
        if self.vllm and self.engine != "vllm":
            raise ValueError(
                f"generator.vllm ({', '.join(self.vllm)}) needs generator.engine: vllm, it is {self.engine}"
            )

    def check_installed(self) -> None:
        """Raises:
        ImportError: vLLM is not installed; says what to install.
        ValueError: an unsupported argument of vLLM.
        """
        if self.engine == "vllm":
            from .vllm_args import check_installed, check_options

            check_installed()
            check_options(self.vllm)
