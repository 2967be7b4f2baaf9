"""TorchTitan's models and parallelisation as a policy, behind the interface of `forge.training.policy`.

What TorchTitan's own trainer is for (data, loss, optimiser, checkpoints) stays with `PolicyTrainer`, so that both
backends train the same way; what is taken from it is how a model computes and how it is divided.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from ..types import Batch
from .distributed import Ranks
from .policy import TokenScores, own_tokens
from .sequence import whole
from .titan_model import plain_name, shared, titan_config

# isort: split
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.sharding import ShardingConfig


class TitanPolicy(nn.Module):
    """A causal language model of TorchTitan.

    Args:
        model: already divided as `ranks` are.
        folder: the Hugging Face checkpoint that it was read from.
    """

    def __init__(self, model: Decoder, folder: Path, ranks: Ranks) -> None:
        super().__init__()
        self.model, self.ranks = model, ranks
        self.config = AutoConfig.from_pretrained(folder)
        stated = (folder / GENERATION_CONFIG_NAME).exists()
        self.generation = GenerationConfig.from_pretrained(folder) if stated else None
        model._skip_lm_head = True  # it is computed for trained tokens alone

    def forward(self, batch: Batch, temperature: float = 1.0) -> TokenScores:
        """Log-probability and entropy of each token with mask True."""
        # The state at t - 1 predicts token t.
        own = own_tokens(batch, 1, self.ranks)
        hidden = self.model(own.gathered[None], own.positions[None], (own.layout, self.ranks.context))
        states = shared(hidden)[0].chunk(self.ranks.tensor.size)[self.ranks.tensor.rank]
        scores = self.model.lm_head(states[own.at], own.labels, temperature)
        return TokenScores(*whole(scores, own.counts, self.ranks.sequence))

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(Hugging Face name, what this rank holds of it), a DTensor where it is divided; of tied ones the first."""
        return ((plain_name(name), parameter) for name, parameter in self.model.named_parameters())

    def save(self, folder: Path, weights: dict[str, Tensor], words: PreTrainedTokenizerBase) -> None:
        """Write whole weights, under the names of `named_weights`, and the configuration."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)
        if self.generation is not None:
            model.generation_config = self.generation
        model.save_pretrained(folder, state_dict=weights)


def build_titan(
    path: str | Path,
    ranks: Ranks,
    *,
    seq_len: int,
    dtype: torch.dtype = torch.float32,
    gradient_checkpointing: bool = False,
    cpu_offload: bool = False,
    compile: bool = False,
) -> TitanPolicy:
    """The model of a local folder, on the device of `ranks` and in training mode; arguments as of `build`.

    No rank ever holds the whole model: it is divided before it is read.

    ValueError: a model that TorchTitan does not have, or that cannot be divided so.
    """
    config = AutoConfig.from_pretrained(path)
    sizes, checkpointing = titan_config(config, seq_len), FullAC.Config().build(dump_folder="")
    with torch.device("meta"):
        if ranks.mesh is None:
            model = sizes.build()
            if gradient_checkpointing:
                checkpointing.apply(model)
        else:
            degrees = dict(zip(ranks.mesh.mesh_dim_names or (), ranks.mesh.shape, strict=True))
            parallelism = ParallelismConfig(
                data_parallel_replicate_degree=degrees.get("replicate", 1),
                # Context parallelism is in the attention that the model is given; to the weights it is like data.
                data_parallel_shard_degree=degrees["shard"],
                tensor_parallel_degree=degrees.get("tensor", 1),
                spmd_backend="partial_dtensor",  # the default does not work with torch 2.13's fully_shard
            )
            sizes.update_from_config(config=SimpleNamespace(parallelism=parallelism))
            # Its input is no activation of all tokens: only the weight is divided.
            head = sizes.lm_head.sharding_config
            sizes.lm_head.sharding_config = ShardingConfig(state_shardings=head.state_shardings)
            model = sizes.build()
            places = ParallelDims.from_config(parallelism, ranks.world_size)
            if places.tp_enabled:
                model.parallelize(places)
                if config.tie_word_embeddings:
                    # It divides each by itself; FSDP2 has to see that they are one.
                    model.tok_embeddings.weight = model.lm_head.weight
            if gradient_checkpointing:
                checkpointing.apply(model)
            apply_fsdp_to_decoder(
                model,
                places.get_mesh(["dp_replicate", "fsdp"] if places.dp_replicate_enabled else ["fsdp"]),
                param_dtype=dtype,
                reduce_dtype=torch.float32,
                pp_enabled=False,
                cpu_offload=cpu_offload,
            )
    model.to_empty(device="cpu" if cpu_offload else ranks.device)
    model.init_states(buffer_device=ranks.device)
    read = {plain_name(name): parameter.detach() for name, parameter in model.named_parameters()}
    dcp.load(read, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=ranks.world_size == 1)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Weights of the loss are already shares of the whole batch: gradients add up, and gloo can only add.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if compile:
        for layer in model.layers.values():
            layer.compile(dynamic=True)
    return TitanPolicy(model, Path(path), ranks).train()
