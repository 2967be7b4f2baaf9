"""What a loss sees of tokens: ids, positions and groups; and advantages of single tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forge.algorithms import Algorithm, load_algorithm
from forge.data.packing import pack
from forge.models.find import build_small_model
from forge.models.tokenizer import character_tokenizer, open_tokenizer
from forge.training import credit
from forge.training.policy import TokenScores
from forge.training.step import loss_inputs, parameters_of
from forge.types import Batch, Episode, Group
from tests.training.cases import make_trainer

LETTERS = character_tokenizer("abcdefghijklmnopqrstuvwxyz: ,")


def episode(prompt: str, answer: str, advantage: Any = 1.0, reward: float = 1.0) -> Episode:
    ids = LETTERS(answer)["input_ids"]
    made = Episode(
        prompt_ids=LETTERS(prompt)["input_ids"],
        response_ids=ids,
        reward=reward,
        logprobs=[-1.0] * len(ids),
        versions=[0] * len(ids),
    )
    made.advantage = advantage
    return made


def batch_of(*episodes: Episode) -> Batch:
    batch = pack(episodes)
    batch.groups = np.arange(len(episodes)) // 2
    return batch


def inputs_of(batch: Batch) -> dict[str, Any]:
    count = int(batch.mask.sum())
    output = TokenScores(torch.full((count,), -1.0, requires_grad=True), torch.ones(count))
    return loss_inputs(batch, output)


def test_loss_inputs_contain_ids_positions_and_groups_of_tokens():
    batch = batch_of(episode("ab", "cde"), episode("abc", "d"), episode("a", "bc"))
    inputs = inputs_of(batch)
    assert LETTERS.decode(inputs["tokens"].tolist()) == "cdedbc"
    assert inputs["positions"].tolist() == [0, 1, 2, 0, 0, 1]
    assert inputs["groups"].tolist() == [0, 0, 0, 0, 1, 1]
    assert inputs["sequences"].tolist() == [0, 0, 0, 1, 2, 2]


def shaped(logprobs: Tensor, advantages: Tensor, weights: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    return -(weights * advantages * (tokens > 3) * 0.9**positions * logprobs).sum()


@dataclass(eq=False)
class Later(Algorithm):
    """Trains on a token less the later it comes."""

    decay: float = 0.5

    def token_loss(
        self, ratio: Tensor, logprobs: Tensor, advantages: Tensor, positions: Tensor, weights: Tensor
    ) -> Tensor:
        assert weights.shape == positions.shape
        return -(self.decay**positions) * ratio * advantages


@pytest.fixture
def model(tmp_path: Path) -> str:
    sizes = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1, "max_positions": 128}
    return build_small_model(tmp_path / "model", seed=0, alphabet="abcdefghijklmnopqrstuvwxyz: ,", **sizes)


def test_trainer_passes_tensors_named_by_loss_arguments(model: str):
    assert open_tokenizer(model).get_vocab() == LETTERS.get_vocab()
    batch = batch_of(episode("q", "so answer: ab"), episode("q", "answer: b", -1.0))
    algorithm = load_algorithm(Later(decay=0.9))
    assert {"weights", "positions"} <= parameters_of(algorithm).keys()
    trainer = make_trainer(Path(model))
    batch.logprobs = np.where(batch.mask, trainer.logprobs(batch), 0.0).astype(np.float32)
    inputs = inputs_of(batch)
    expected = -(0.9 ** inputs["positions"] * inputs["advantages"] * inputs["weights"]).sum()
    assert trainer.train_step(batch, algorithm)["loss"] == pytest.approx(float(expected), abs=1e-6)
    assert np.isfinite(trainer.train_step(batch, load_algorithm(shaped))["loss"])


def test_token_loss_arguments_are_passed_by_name():
    class Reordered(Algorithm):
        def token_loss(self, behaviour_logprobs, advantages, logprobs):
            return -(logprobs - behaviour_logprobs).exp() * advantages

    tensors = [torch.randn(5) for _ in range(3)]
    arguments = dict(zip(("logprobs", "behaviour_logprobs", "advantages"), tensors, strict=True))
    weights = torch.full((5,), 0.2)
    plain = Algorithm()(**arguments, weights=weights)
    assert plain != 0
    assert Reordered()(**arguments, weights=weights) == pytest.approx(float(plain))


def test_unknown_loss_argument_name_raises_one_line_error():
    class Wrong(Algorithm):
        def token_loss(self, ratio, logprobs, advantages, token_ids):
            return -ratio * advantages

    with pytest.raises(
        ValueError, match="token_loss has the parameter 'token_ids', which is not a tensor of a batch; available"
    ):
        load_algorithm(Wrong())

    def loss(logprobs, weights, token_ids):
        return logprobs

    with pytest.raises(
        ValueError,
        match=r"needs 'token_ids', which is neither set under grpo nor a tensor of a batch \(logprobs, .*tokens",
    ):
        load_algorithm(loss)


class Decayed(Algorithm):
    """The reward of an answer counts less for its later tokens; of an episode that says `x`, nothing does."""

    def advantages(self, rewards: Sequence[Sequence[float]], episodes: Sequence[Sequence[Episode]]) -> Any:
        x = LETTERS("x")["input_ids"][0]
        return [
            [
                0.0 if x in e.tokens else [reward * 0.5**i for i in range(sum(e.mask))]
                for reward, e in zip(r, group, strict=True)
            ]
            for r, group in zip(rewards, episodes, strict=True)
        ]


def test_per_token_advantages_of_algorithm_are_packed():
    group = Group([episode("a", "bcd", None, 2.0), episode("a", "bx", None), episode("a", "bc", None, 1.0)])
    batch = credit.make_batch([group], Decayed(), 0)
    # The one without an advantage has no gradient.
    assert len(batch) == 2
    assert batch.advantages.tolist() == [0, 2, 1, 0.5, 0, 1, 0.5]
