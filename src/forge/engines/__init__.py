"""Generation engines: tokens in, tokens with log-probabilities and weight versions out."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.plugin import resolve
from .interface import Engine
from .settings import EngineSettings

if TYPE_CHECKING:
    import torch

    from .engine import EmbeddedEngine

ENGINES = {"vllm": "forge_vllm.engine:VLLMEngine", "tinker": "forge_tinker.remote:TinkerEngine"}
__all__ = ["EmbeddedEngine", "Engine", "EngineSettings", "load_engine"]


def load_engine(
    engine: str,
    model: str | Path,
    *,
    version: int = 0,
    device: "str | torch.device | None" = None,
    colocated: bool = False,
    **settings: Any,
) -> Engine:
    """Start a generation engine with a model folder and return it.

    Args:
        engine: "embedded", "vllm" or "tinker".
        model: a folder in Hugging Face format.
        version: the number of the weights in the folder.
        device: for the embedded engine; by default a GPU if there is one.
        colocated: a trainer takes turns with the engine on its device: it is released before each weight update.
        settings: fields of `EngineSettings`.

    Raises:
        ImportError: vLLM is not installed; the message says how to install it.
        ValueError: a setting is invalid, or the model is unsupported.
        FileNotFoundError: the folder is incomplete.
    """
    options = EngineSettings(engine=engine, **settings)  # type: ignore[arg-type]
    # Each engine is imported only where it runs: vLLM may not be installed, and torch takes seconds.
    if options.engine != "embedded":
        return resolve(ENGINES[options.engine], "generator.engine")(model, version=version, **options)
    from .engine import EmbeddedEngine

    return EmbeddedEngine(model, version=version, device=device, colocated=colocated, **options)


def __getattr__(name: str) -> object:
    # Imported on first use: torch takes seconds.
    if name == "EmbeddedEngine":
        from .engine import EmbeddedEngine

        return EmbeddedEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
