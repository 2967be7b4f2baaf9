"""Settings of training, the sections of a configuration. Imports no torch."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from ..config.plugin import resolve
from ..config.sections import Section
from ..models.architecture import BIASES, MLP_BIASES, is_native, sparse_layers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SPLIT_BY_NAME = ("llama", "qwen2", "qwen3", "mistral", "smollm3", "gemma3_text")  # families with tensor parallelism
Backend = Literal["fsdp", "titan", "tinker"]
Head = Literal["policy", "value", "reward"]
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

FUSED = ("qkv_proj", "gate_up_proj")  # Phi-3's names for several of them in one


class OptimizerSettings(Section):
    """The optimiser, AdamW (Loshchilov & Hutter 2019) by default, with a schedule over optimiser steps."""

    optimizer: str = "adamw"
    """`adamw`, or a class of torch's interface that takes groups, `lr`, `betas` and `eps`, such as
    `torchao.optim:AdamW8bit` ([large_models.md](large_models.md))."""
    optimizer_dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of the optimiser's state; null: the weights'. float32 with bfloat16 weights keeps their low bits
    as well: no update is lost, at 14 bytes a parameter. bfloat16 with float32 weights: 12 bytes."""
    learning_rate: float = Field(1e-6, ge=0)
    """Peak learning rate."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of matrices; other parameters have none."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the running mean of gradients."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the running mean of squared gradients."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to the root of the running mean of squares."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Clip the global gradient norm to this; 0: no clipping."""
    warmup_steps: int = Field(0, ge=0)
    """Linear warm-up from 0 to the peak, in steps."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up, down to `min_lr_ratio` of the peak at `steps`."""
    min_lr_ratio: float = Field(0.1, ge=0)
    """Final learning rate as a share of the peak."""
    steps: int = Field(0, ge=0)
    """Optimiser steps of the run."""

    def _check(self) -> None:
        # Combinations that would silently do something else.
        if self.schedule != "constant" and self.steps <= self.warmup_steps:
            raise ValueError(f"a {self.schedule} schedule needs steps > warmup_steps, got {self.steps}")

        if self.optimizer != "adamw":
            resolve(self.optimizer, "training.optimizer")
        if self.optimizer_dtype == "bfloat16" and self.beta2 >= 1 - 1 / 256:
            raise ValueError(
                f"training.beta2 = {self.beta2} is too close to 1 for training.optimizer_dtype bfloat16, which rounds "
                "smaller changes of the second moment away: set it below 0.996, or optimizer_dtype to float32"
            )

    def kind(self, weights_dtype: str) -> str:
        """Return the name of the optimiser, with the dtype of its state if that differs from the weights' dtype.

        >>> OptimizerSettings(optimizer_dtype="float32").kind(weights_dtype="bfloat16")
        'adamw with float32 state'
        """
        differs = self.optimizer_dtype not in (None, weights_dtype)
        return f"{self.optimizer} with {self.optimizer_dtype} state" if differs else self.optimizer

    def scale(self, step: int) -> float:
        """Return the learning rate of optimiser step `step`, from 0, as a share of the peak.

        >>> OptimizerSettings(warmup_steps=4).scale(step=0)
        0.25
        """
        # Step 0 has a rate above 0: it would be wasted otherwise.
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0

        progress = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        decay = 1.0 - progress if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * decay


class PassSettings(Section):
    """Settings of the passes of a step's batch through the model: mini-batches, memory and precision."""

    seq_len: PositiveInt = 4096
    """Longest sequence, and most tokens of a packed micro-batch: lower it when memory runs out."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the forward and backward pass. A CPU without bfloat16 arithmetic computes in float32 and logs it."""
    weights_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of weights, gradients and, unless `optimizer_dtype` is set, moments: 16 or 8 bytes a parameter. In
    bfloat16 an update below about 1/256 of a weight is lost to rounding: set `optimizer_dtype` to float32, raise the
    learning rate, or train adapters (`lora`), which then are bfloat16 as well."""
    gradient_accumulation_steps: PositiveInt = 1
    """Least number of micro-batches of an update on each rank."""
    mini_batches: PositiveInt = 1
    """Number of parts of a batch; each makes an update. The samples of a prompt stay together, unless there are fewer
    prompts than parts."""
    epochs: PositiveInt = 1
    """Passes of a step over its batch: a step makes `mini_batches` * `epochs` updates. Policy versions count steps."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    router_aux_loss: float = Field(0.0, ge=0)
    """For a mixture of experts: weight of the loss that balances their load ([large_models.md](large_models.md)).
    The model's authors' is `router_aux_loss_coef` in its config.json."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimiser in host memory; layers come to the GPU to compute. Needs a GPU."""
    deterministic: bool = False
    """The same bits each time, on a GPU as well: long sequences then use slower attention (1.9 times as long at 65,536
    tokens). On a CPU they always are."""
    exact: bool = False
    """Compute log-probabilities with the bits of the embedded engine, and stop at the first token that differs
    ([engines.md](engines.md)). On CPUs, for dense models of the ten families."""
    compile: bool = False
    """torch.compile decoder layers but for attention; with `gradient_checkpointing` their norms and feed-forward."""

    def _check(self) -> None:
        super()._check()
        if self.weights_dtype == "bfloat16" and self.dtype != "bfloat16":
            raise ValueError("training.weights_dtype bfloat16 needs training.dtype bfloat16")
        if self.exact and (self.compile or self.weights_dtype != "float32"):
            raise ValueError("training.exact supports neither training.weights_dtype nor training.compile: omit them")

    def check(self, config: "PreTrainedConfig") -> None:
        """Check the settings that only some policies support.

        Raises:
            ValueError: a policy of this transformers config does not support one that is set.
        """
        experts = sparse_layers(config)
        if self.exact and (experts or not is_native(config)):
            raise ValueError(
                f"training.exact supports only dense models of the built-in families, got {config.model_type}"
            )
        if self.compile and experts:
            raise ValueError(f"training.compile does not support mixture-of-experts models, got {config.model_type}")
        if self.router_aux_loss and not experts:
            raise ValueError(f"training.router_aux_loss needs a mixture-of-experts model, got {config.model_type}")


class LoraSettings(Section):
    """Train low-rank factors next to frozen weights (Hu et al. 2021): W + (alpha / rank) B A. Null trains all weights.
    Generators receive the adapters only; exports are merged."""

    rank: PositiveInt = 16
    """Rank of each layer's update."""
    alpha: PositiveFloat = 32.0
    """The update is scaled by alpha / rank."""
    targets: list[str] | None = Field(None, min_length=1)
    """Names of linear layers, without the path to them; null: all of attention and feed-forward, but experts."""
    quantize: Literal["nf4"] | None = None
    """Hold the frozen matrices of these layers in four bits ([large_models.md](large_models.md))."""

    def layers(self, linear_layers: Iterable[str]) -> tuple[str, ...]:
        """Return which of the given linear layers of a model get an adapter, by name.

        >>> LoraSettings().layers(["q_proj", "down_proj", "router"])
        ('q_proj', 'down_proj')
        """
        if self.targets is not None:
            return tuple(self.targets)
        return tuple(name for name in (*TARGETS, *FUSED) if name in linear_layers)


class PolicySettings(PassSettings):
    """Keyword arguments of `forge.training.trainer.PolicyTrainer`, which describes them."""

    backend: Backend = "fsdp"
    """Whose model."""
    base_model: str | None = None
    """Its name at the server of backend "tinker"."""
    head: Head = "policy"
    """What it predicts."""
    lora: LoraSettings | None = None
    """Adapters; null trains all weights."""
    temperature: PositiveFloat = 1.0
    """Of the sampler."""


class Parallelism(Section):
    """Degrees whose product is the number of ranks: `services.trainer.procs`, the critic's, and a reference
    model of several processes."""

    data_parallel_replicate_degree: int | None = None
    """Copies of the shards (HSDP); null: what the other degrees leave."""
    data_parallel_shard_degree: int = -1
    """Ranks that share one copy of the weights and see different sequences (FSDP2); -1: what the others leave."""
    tensor_parallel_degree: int = 1
    """Ranks that share the heads and feed-forward of each layer, and the tokens between them."""
    context_parallel_degree: int = 1
    """Ranks that share the weights, the tokens of a sequence and, in attention, the heads (Ulysses)."""
    expert_parallel_degree: int = 1
    """For a mixture of experts: neighbouring ranks, out of shard and context ranks, that divide the experts between
    them and exchange tokens instead of weights ([large_models.md](large_models.md)). Needs `trainer.backend` titan."""
    pipeline_parallel_degree: int = 1
    """Groups of ranks that share the layers: each computes its stages and sends the states on. Needs `trainer.backend`
    titan."""
    pipeline_parallel_schedule: Literal["1F1B", "Interleaved1F1B"] = "1F1B"
    """Order of the micro-batches in a pipeline: `1F1B` has one stage for each group of ranks, `Interleaved1F1B` two."""

    @property
    def stages(self) -> int:
        """Return the number of stages of the pipeline, which has 1 if all ranks compute all layers."""
        degree = self.pipeline_parallel_degree
        return 2 * degree if degree > 1 and self.pipeline_parallel_schedule == "Interleaved1F1B" else degree

    def over(self, ranks: int, subject: str | None = None) -> "Parallelism":
        """Return a copy with the unset degrees filled in, so that their product is the number of ranks.

        Args:
            subject: how messages of errors call the ranks; None: "the trainer's <ranks> ranks".

        Raises:
            ValueError: a degree is invalid or unsupported, or the product is not the number of ranks.
        """
        subject = subject or f"the trainer's {ranks} ranks"
        replicate = self.data_parallel_replicate_degree
        shard = self.data_parallel_shard_degree

        # Each degree by itself.
        kinds = (
            "data_parallel_replicate",
            "tensor_parallel",
            "context_parallel",
            "expert_parallel",
            "pipeline_parallel",
        )
        for name in (f"{kind}_degree" for kind in kinds):
            if (degree := getattr(self, name)) is not None and degree < 1:
                raise ValueError(f"parallelism.{name} must be at least 1, got {degree}")

        # The product of the degrees is the number of ranks.
        others = self.pipeline_parallel_degree, self.tensor_parallel_degree, self.context_parallel_degree
        if ranks % math.prod(others):
            raise ValueError(
                "parallelism: pipeline_parallel_degree * tensor_parallel_degree * context_parallel_degree = "
                f"{' * '.join(map(str, others))} does not divide {subject}"
            )

        # Data parallelism has the ranks that the other degrees leave; -1 and null mean all of these.
        data = ranks // math.prod(others)
        remark = "" if data == ranks else f", of which the other degrees leave {data}"
        for name, degree in (("replicate", replicate or 1), ("shard", data if shard == -1 else shard)):
            if degree < 1 or data % degree:
                raise ValueError(
                    f"parallelism.data_parallel_{name}_degree = {degree} does not divide {subject}{remark}"
                )

        if shard == -1:
            shard = data // (replicate or 1)
        replicate = replicate or data // shard
        if replicate * shard != data:
            raise ValueError(
                f"parallelism: data_parallel_replicate_degree * data_parallel_shard_degree = {replicate} * {shard} "
                f"does not make {subject}{remark}"
            )

        # Experts are divided among the ranks that shard a layer.
        if (shard * self.context_parallel_degree) % self.expert_parallel_degree:
            raise ValueError(
                f"parallelism.expert_parallel_degree = {self.expert_parallel_degree} does not divide "
                f"data_parallel_shard_degree * context_parallel_degree = {shard} * {self.context_parallel_degree}"
            )

        return self.model_copy(
            update={"data_parallel_replicate_degree": replicate, "data_parallel_shard_degree": shard}
        )

    def check(self, config: "PreTrainedConfig") -> None:
        """Check that these degrees can divide a model of this transformers config.

        Raises:
            ValueError: its family has no tensor parallelism, or a size is not a multiple of a degree.
        """
        tensor, context = self.tensor_parallel_degree, self.context_parallel_degree
        family = config.model_type

        if context > 1 and not is_native(config):
            resolve("forge_families.probe:check_packed", "model")(config, "parallelism.context_parallel_degree")

        # Layers are divided by the names of their modules, which differ between families.
        if tensor > 1 and family not in SPLIT_BY_NAME:
            supported = ", ".join(SPLIT_BY_NAME)
            raise ValueError(f"parallelism.tensor_parallel_degree: {family} models are not supported; use {supported}")

        biases = (("attention_bias", BIASES), ("mlp_bias", MLP_BIASES))
        if tensor > 1 and any(family in families and getattr(config, name, False) for name, families in biases):
            raise ValueError("parallelism.tensor_parallel_degree: a bias of o_proj or down_proj is not supported")

        # Heads and columns are divided equally.
        for name, degree, product in (
            ("num_attention_heads", tensor * context, "tensor_parallel_degree * context_parallel_degree"),
            ("num_key_value_heads", tensor, "tensor_parallel_degree"),
            ("intermediate_size", tensor, "tensor_parallel_degree"),
            ("hidden_size", tensor, "tensor_parallel_degree"),
        ):
            if degree > 1 and getattr(config, name) % degree:
                raise ValueError(
                    f"parallelism: the model's {name} = {getattr(config, name)} is not a multiple of "
                    f"{product} = {degree}"
                )
