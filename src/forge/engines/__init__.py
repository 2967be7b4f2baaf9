"""Generation engines: tokens in, tokens with log-probabilities and weight versions out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.engines.interface import Engine

if TYPE_CHECKING:
    from forge.engines.engine import EmbeddedEngine

ENGINES = ("embedded", "vllm")

__all__ = ["ENGINES", "EmbeddedEngine", "Engine", "load_engine"]


def load_engine(name: str, model: str | Path, *, vllm: Mapping[str, Any] | None = None, **args: Any) -> Engine:
    """The engine of this name with a model folder in it.

    args: slots, max_seq_len, dtype, version and on_update, as `EmbeddedEngine` takes them. vllm: further fields of
    vLLM's AsyncEngineArgs.

    ImportError: vLLM is not installed; says how to. ValueError, FileNotFoundError: as `EmbeddedEngine` raises them,
    another name, or `vllm` for another engine.
    """
    if name not in ENGINES:
        raise ValueError(f"generator.engine must be one of {', '.join(ENGINES)}, got {name!r}")
    if name == "vllm":
        from forge.engines.vllm import VLLMEngine

        return VLLMEngine(model, options=vllm or {}, **args)
    if vllm:
        raise ValueError(f"generator.vllm ({', '.join(vllm)}) needs generator.engine vllm, it is {name}")
    from forge.engines.engine import EmbeddedEngine

    return EmbeddedEngine(model, **args)


def __getattr__(name: str) -> Any:
    # Imported on first use: torch takes seconds.
    if name == "EmbeddedEngine":
        from forge.engines.engine import EmbeddedEngine

        return EmbeddedEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
