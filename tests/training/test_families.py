"""Every family trains as plain transformers does, and what it writes is a model of transformers and of the engine."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from forge.engines import EmbeddedEngine
from forge.losses import SFTLoss
from forge.training import checkpoint
from forge.training.lora import SCORE
from forge.training.settings import SPLIT_BY_NAME, Parallelism
from forge.types import Sampling
from tests.training.cases import (
    FAMILIES,
    example,
    largest_difference,
    make_trainer,
    tiny_model,
    weights_of,
    write_model,
)

LENGTHS = [(3, 5), (1, 9), (6, 2), (7, 12)]


@pytest.mark.parametrize("family", FAMILIES)
def test_training_step_of_each_family_matches_transformers_and_adamw(tmp_path: Path, family: str):
    write_model(tmp_path, family, tied=family != "olmo2")
    batch = example(0, LENGTHS)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
    trained = int(batch.mask.sum())
    loss = torch.zeros(())
    for ids, mask in zip(
        *(np.split(x, np.cumsum(batch.lengths)[:-1]) for x in (batch.tokens, batch.mask)), strict=True
    ):
        own, labels = torch.from_numpy(ids)[None], torch.from_numpy(np.where(mask, ids, -100))[None]
        loss = loss + plain(own, labels=labels).loss * (mask.sum() / trained)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer.step()

    trainers = [
        make_trainer(tmp_path, learning_rate=1e-2, epsilon=1e-4, gradient_checkpointing=x) for x in (False, True)
    ]
    expected = dict(plain.named_parameters())
    for trainer in trainers:
        metrics = trainer.train_step(batch, SFTLoss())
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert largest_difference(weights_of(trainer), {n: p.detach() for n, p in expected.items()}) < 1e-4


@pytest.mark.parametrize("lora", [None, {"rank": 3}], ids=["whole", "adapters"])
@pytest.mark.parametrize("family", FAMILIES)
def test_exported_families_load_in_transformers_and_engine(tmp_path: Path, family: str, lora: dict[str, int] | None):
    write_model(tmp_path / "first", family, tied=family != "olmo2")
    trainer, batch = make_trainer(tmp_path / "first", learning_rate=1e-2, lora=lora), example(1, [(3, 12)])
    before = trainer.logprobs(batch)
    for _ in range(3):
        trainer.train_step(batch, SFTLoss())
    scores = trainer.logprobs(batch)
    assert scores.sum() > before.sum() + 1
    checkpoint.export_model(trainer, tmp_path / "written", tmp_path / "first")
    ids = torch.from_numpy(batch.tokens)[None]
    logits = AutoModelForCausalLM.from_pretrained(tmp_path / "written", attn_implementation="eager")(ids).logits
    expected = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].detach().numpy()
    np.testing.assert_allclose(scores[1:][batch.mask[1:]], expected[batch.mask[1:]], atol=1e-4)
    with (
        EmbeddedEngine(tmp_path / "written", slots=2) as opened,
        EmbeddedEngine(tmp_path / "first", slots=2) as updated,
    ):
        updated.update_weights(trainer.export_weights(), 1).result(30)
        wanted = Sampling(max_tokens=16, temperature=0, top_logprobs=5)
        one, two = (engine.submit([5, 6, 7], wanted).result(30)[0] for engine in (opened, updated))
        assert (one.token_ids, one.top_logprobs) == (two.token_ids, two.top_logprobs)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "olmoe"])
def test_scalar_head_of_each_family_matches_transformers(tmp_path: Path, family: str):
    write_model(tmp_path, family)
    batch = example(0, [(2, 10)])
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1, attn_implementation="eager")
    score = torch.randn(1, 32, generator=torch.Generator().manual_seed(3))
    trainer = make_trainer(tmp_path, head="reward")
    trainer.policy.model.get_parameter(SCORE).data.copy_(score)
    states = model.model(torch.from_numpy(batch.tokens)[None]).last_hidden_state[0]
    expected = (states @ score[0]).detach().numpy()
    error = np.abs(trainer.predict(batch) - expected)
    # Rounding follows the sum's terms, which cancel: they are 14 to 25, and 45 in Gemma 3.
    terms = (states.abs() @ score[0].abs()).detach().numpy()
    np.testing.assert_array_less(error[batch.mask], 4 * np.finfo(np.float32).eps * terms[batch.mask])


@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_parallelism_of_unsupported_family_raises(family: str):
    config = tiny_model(family).config
    degrees = Parallelism(tensor_parallel_degree=2)
    if config.model_type in SPLIT_BY_NAME:
        degrees.check(config)
    else:
        with pytest.raises(ValueError, match=f"tensor_parallel_degree: {family} models are not supported; use llama"):
            degrees.check(config)
    Parallelism(context_parallel_degree=2).check(config)
