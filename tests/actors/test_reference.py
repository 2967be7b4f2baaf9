"""A reference model over several processes scores as one process does, and as transformers."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from forge.actors import ReferenceModel
from forge.data.packing import pack
from forge.models import build_small_model
from forge.runtime.controller import endpoint, run
from forge.types import Episode

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "max_positions": 64}
    return Path(build_small_model(tmp_path_factory.mktemp("model"), seed=0, alphabet="abcdefgh>", **sizes))


def episodes() -> list[Episode]:
    draw = np.random.default_rng(0)
    return [
        Episode(
            prompt_ids=draw.integers(3, 11, 4).tolist(),
            response_ids=draw.integers(3, 11, length).tolist(),
            reward=1.0,
            advantage=1.0,
        )
        for length in (3, 9, 1, 6, 12)
    ]


def expected(model: Path) -> np.ndarray:
    """By transformers, one episode after another."""
    found = []
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for episode in episodes():
        tokens = torch.tensor(episode.tokens)
        with torch.no_grad():
            logits = policy(tokens[None]).logits[0, :-1] / TEMPERATURE
        of_each = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        found.append(of_each[torch.tensor(episode.mask[1:])])
    return torch.cat(found).numpy()


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize(
    "degrees",
    [{}, *(pytest.param({f"{kind}_parallel_degree": 2}, marks=pytest.mark.slow) for kind in ("tensor", "context"))],
    ids=["shards", "tensor", "context"],
)
def test_two_process_reference_model_logprobs_equal_one_process(model: Path, degrees: dict[str, int]):
    batch = pack(episodes())

    async def main() -> None:
        alone, shared = await score(1), await score(2)
        for found in (*alone, *shared):
            assert not found[~batch.mask].any()
            np.testing.assert_allclose(found[batch.mask], expected(model), atol=1e-5)

    async def score(procs: int) -> tuple[np.ndarray, np.ndarray]:
        settings = {"temperature": TEMPERATURE, "seq_len": 32, "parallelism": degrees}
        reference = await ReferenceModel.options(procs=procs).as_service(str(model), **settings)
        return await reference.logprobs.route(batch), await reference.logprobs.route(batch)

    run(main())


@pytest.mark.full
@pytest.mark.processes
async def test_killed_reference_model_process_is_replaced(model: Path):
    batch = pack(episodes())

    class Known(ReferenceModel):
        @endpoint
        def pid(self) -> int:
            return os.getpid()

    reference = await Known.options(procs=2).as_service(str(model), temperature=TEMPERATURE)
    before = await reference.logprobs.route(batch)
    first = await reference.pid.route()
    os.kill(first, signal.SIGKILL)
    np.testing.assert_array_equal(await reference.logprobs.route(batch), before)
    assert await reference.pid.route() != first
