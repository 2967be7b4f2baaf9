"""Weights with NaN or infinity: requests that meet them fail, by name, and the others get the same bits as without."""

from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from forge.engines import EmbeddedEngine
from forge.engines.requests import UnusableWeights
from forge.types import Completion, Sampling

from .conftest import random_model

GOOD = [5, 17, 2]
BAD = [5, 9, 2]  # token 9 is damaged


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return random_model("qwen3", max_position_embeddings=64)


@pytest.fixture(scope="module")
def folder(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def damaged(model: torch.nn.Module, name: str, value: float) -> dict[str, torch.Tensor]:
    """Weights of the model of which one row is not a number."""
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    state[name][9] = value
    return state


def submit(engine: EmbeddedEngine, prompt: list[int], **settings: object) -> Future[list[Completion]]:
    return engine.submit(prompt, Sampling(**{"max_tokens": 6, "seed": 4, **settings}))


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"n": 2}, {"top_k": 3}])
def test_nan_weights_fail_only_affected_requests(settings: dict[str, object], model: torch.nn.Module, folder: Path):
    with EmbeddedEngine(folder, device="cpu", slots=4) as engine:
        expected = submit(engine, GOOD, **settings).result(60)
        assert not any(9 in completion.token_ids for completion in expected)
        engine.update_weights(damaged(model, "model.embed_tokens.weight", float("nan")).items(), 1, "x").result(60)
        futures = [submit(engine, prompt, **settings) for prompt in (GOOD, BAD, GOOD)]
        for future in (futures[0], futures[2]):
            for completion, other in zip(future.result(60), expected, strict=True):
                assert (completion.token_ids, completion.logprobs) == (other.token_ids, other.logprobs)
                assert completion.finish == other.finish
        with pytest.raises(UnusableWeights, match="weights version 1 give logits that are NaN or infinite"):
            futures[1].result(60)
        # Nothing of it stays in the rows that others get, shorter ones too.
        for _ in range(3):
            assert [c.token_ids for c in submit(engine, GOOD, **settings).result(60)] == [c.token_ids for c in expected]
        # Right weights are all that is needed.
        engine.update_weights(model.state_dict().items(), 2, "y").result(60)
        assert submit(engine, BAD, **settings).result(60)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.layers.0.mlp.down_proj.weight", "lm_head.weight"])
def test_requests_on_nan_or_inf_weights_fail_without_streaming_tokens(
    name: str, value: float, model: torch.nn.Module, folder: Path
):
    with EmbeddedEngine(folder, device="cpu") as engine:
        engine.update_weights(damaged(model, name, value).items(), 1, "x").result(60)
        pieces: list[Completion] = []
        streamed = engine.submit(
            GOOD, Sampling(max_tokens=5, seed=1), listener=lambda sample, piece: pieces.append(piece)
        )
        with pytest.raises(UnusableWeights):
            streamed.result(60)
        assert not pieces
        with pytest.raises(UnusableWeights):
            submit(engine, GOOD, temperature=0.0).result(60)
