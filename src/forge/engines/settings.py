"""Settings of the generation engines: the `generator` section of a configuration. Imports no torch."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveInt

from ..config.plugin import resolve
from ..config.sections import Section
from ..models.architecture import is_native, sparse_layers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class EngineSettings(Section):
    """The generation engine ([engines.md](engines.md))."""

    engine: Literal["embedded", "vllm", "tinker"] = "embedded"
    """`embedded` is plain PyTorch; `vllm` needs an environment with vLLM; `tinker` follows from `trainer.backend`."""
    slots: PositiveInt = 256
    """Sequences decoded at once."""
    max_seq_len: int | None = Field(None, ge=2)
    """Most tokens of prompt and completion together; null: the model's limit, at most 4096."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of weights and cache. A CPU without bfloat16 arithmetic computes in float32 and logs it
    (`embedded`)."""
    on_update: Literal["continue", "finish", "recompute"] = "continue"
    """Running sequences at a weight update: they `continue` under the new weights with the keys and values
    they have, `finish` under the old ones first, or `recompute` keys and values under the new ones
    ([asynchrony.md](asynchrony.md))."""
    prefix_cache_mb: float = Field(256, ge=0)
    """Memory for keys and values of prompts, in MB: a prompt that starts as another did, such as an episode's next
    turn, is computed from where they differ. A weight update empties it. 0: no cache. vLLM has another."""
    cache_gb: float | None = Field(None, gt=0)
    """Memory for keys and values of running sequences, in GB (`embedded`): a request whose longest possible answer has
    no room alongside those that run waits. Null: what two versions of the weights, or one if `colocated`, leave of a
    GPU's memory; on a CPU as much as `slots` sequences need, taken as it is written. vLLM has
    `gpu_memory_utilization`."""
    cuda_graphs: bool | None = None
    """Capture decode steps as CUDA graphs: one launch a step instead of hundreds (`embedded`, on a GPU, no mixture of
    experts). Null: where that is possible. Requests with a grammar or `top_logprobs` decode without them
    ([engines.md](engines.md))."""
    exact: bool = False
    """Compute prompts and answers as a trainer with `training.exact` does, which sets this."""
    router_replay: bool = False
    """For a mixture of experts: completions carry the experts of each token, and the trainer computes with them
    ([large_models.md](large_models.md)). Needs `embedded`."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments of vLLM's engine, by vLLM's names."""

    def _check(self) -> None:
        # Settings of one engine are an error with another: they would do nothing.
        only_embedded = ("exact", "router_replay", "prefix_cache_mb", "cache_gb", "cuda_graphs")
        foreign = {
            "embedded": ("vllm",),
            "vllm": only_embedded,
            "tinker": (*only_embedded, "vllm", "dtype", "on_update"),
        }
        for name in foreign[self.engine]:
            if self.differs(name):
                raise ValueError(
                    f"generator.{name} is not supported by generator.engine {self.engine}: omit it, or choose "
                    "another engine"
                )

    def check(self, config: "PreTrainedConfig") -> None:
        """Check the settings that only some models support.

        Raises:
            ValueError: the model of this transformers config does not support one that is set.
        """
        from .weights import is_decodable  # which imports torch

        if self.exact and not is_decodable(config):
            raise ValueError(
                f"training.exact needs a model type that the engine's own decoder supports, got {config.model_type}: "
                "omit it"
            )
        if self.router_replay and not sparse_layers(config):
            raise ValueError(
                "generator.router_replay needs a mixture-of-experts model of a built-in family, got "
                f"{config.model_type}: omit it"
            )
        if self.cuda_graphs and not (is_native(config) and not sparse_layers(config)):
            raise ValueError(
                f"generator.cuda_graphs supports dense models of the built-in families only, got {config.model_type}: "
                "omit it"
            )

    def captures(self, config: "PreTrainedConfig", device: str) -> bool:
        """Return whether the embedded engine captures decode steps of this model as CUDA graphs.

        Args:
            device: the type of its device, such as "cuda".
        """
        is_possible = device == "cuda" and is_native(config) and not sparse_layers(config)
        return is_possible if self.cuda_graphs is None else self.cuda_graphs

    def over(self, procs: int) -> "EngineSettings":
        """Return a copy of the settings for one model over `procs` processes, by vLLM's tensor parallelism.

        Raises:
            ValueError: the engine cannot divide a model, or the setting `vllm` divides it over another number.
        """
        # The embedded engine has the whole model in one process.
        if self.engine != "vllm":
            if procs == 1:
                return self
            raise ValueError(
                f"procs = {procs} splits one model over {procs} processes (tensor parallelism), which the embedded "
                f"engine does not support: set generator.engine to vllm, or procs to 1 and num_replicas to {procs}"
            )

        # vLLM divides a model by layers into stages, and each stage by tensors; the product is the number of processes.
        stages = self.vllm.get("pipeline_parallel_size", 1)
        tensor_parallel = self.vllm.get("tensor_parallel_size")
        if procs % stages or tensor_parallel not in (None, procs // stages):
            product = f"{tensor_parallel or '?'} x {stages}"
            raise ValueError(
                f"procs = {procs} must be tensor_parallel_size x pipeline_parallel_size of generator.vllm, {product}"
            )

        if procs == 1:
            return self
        return self.model_copy(update={"vllm": {**self.vllm, "tensor_parallel_size": procs // stages}})

    def check_installed(self) -> None:
        """Check that the configured engine is installed and can run on this machine.

        Raises:
            ImportError: vLLM is not installed; the message says what to install.
            ValueError: the setting `vllm` has an unsupported argument.
        """
        if self.engine == "vllm":
            resolve("forge_vllm.arguments:check_installed", "generator.engine")()
            resolve("forge_vllm.arguments:check_options", "generator.vllm")(self.vllm)
