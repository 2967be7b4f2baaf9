"""In bfloat16 the policy and the frozen reference compute alike: at equal weights no ratio, KL or margin is noise."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from forge.actors import ReferenceModel
from forge.data.packing import pack
from forge.losses import DPOLoss, GRPOLoss
from forge.system.devices import has_bfloat16
from forge.types import Batch
from tests.training.cases import FAMILIES, episodes, make_trainer, write_model


class Here(ReferenceModel):
    """One in this process."""

    context: Any = SimpleNamespace(world_size=1, rank=0, replica=0)


def reference(model: Path, **settings: Any) -> ReferenceModel:
    result = Here(str(model), seq_len=40, **settings)
    result.setup()
    return result


def pairs() -> Batch:
    lengths = [(3, 5), (3, 7), (1, 9), (1, 3), (6, 8), (6, 5), (2, 17), (2, 1)]
    return pack(episodes(lengths), aggregation="sequence_mean", unit=2)


@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_dpo_loss_at_step_1_in_bfloat16_is_log_2(tmp_path: Path, family: str, weights_dtype: str) -> None:
    settings = {"dtype": "bfloat16", "weights_dtype": weights_dtype}
    write_model(tmp_path, family, tied=family not in ("llama", "olmo2"))
    batch, trainer = pairs(), make_trainer(tmp_path, seq_len=40, **settings)
    batch.ref_logprobs = reference(tmp_path, **settings).logprobs(batch)
    np.testing.assert_array_equal(batch.ref_logprobs, trainer.logprobs(batch))
    assert trainer.train_step(batch, DPOLoss())["loss"] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "olmoe"])
def test_kl_to_bfloat16_reference_at_step_1_is_0(tmp_path: Path, family: str) -> None:
    write_model(tmp_path, family)
    batch, trainer = pairs(), make_trainer(tmp_path, seq_len=40, dtype="bfloat16")
    batch.unit, batch.ref_logprobs = 1, reference(tmp_path, dtype="bfloat16").logprobs(batch)
    assert trainer.train_step(batch, GRPOLoss(beta=0.1))["kl"] == pytest.approx(0.0, abs=1e-9)


def test_bfloat16_reference_model_stores_matrices_in_bfloat16(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3", tied=False)
    named = dict(reference(tmp_path, dtype="bfloat16").policy.named_weights())
    if has_bfloat16(torch.device("cpu")):
        rounded = {name for name, weight in named.items() if weight.dtype == torch.bfloat16}
        assert rounded == {name for name in named if name.endswith(("_proj.weight", "lm_head.weight"))}
    whole = dict(reference(tmp_path).policy.named_weights())
    assert {weight.dtype for weight in whole.values()} == {torch.float32}
    for name, weight in named.items():
        assert torch.equal(weight, whole[name].to(weight.dtype))
