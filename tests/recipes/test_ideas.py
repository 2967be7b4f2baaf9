"""Ideas of a researcher, each in at most 20 lines over the public interface."""

import inspect

import pytest

pytest.importorskip("openai")

import forge
from apps.selfplay.main import SelfPlay
from forge.algorithms import GRPO
from forge_envs.samplers import Sampler

pytestmark = [pytest.mark.processes, pytest.mark.full]

ROWS = [{"question": word, "answer": word[::-1]} for word in ("ab", "ba", "abc", "cab", "bac", "cba")]
CHAT = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '>' }}{% endfor %}"
SETTINGS = {
    "from_scratch": {"alphabet": "abc>", "hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1},
    "dataset": {"path": ROWS, "prompt_template": "{question}>"},
    "training": {"batch_size": 2, "steps": 4, "learning_rate": 1e-2, "seq_len": 128},
    "grpo": {"n_samples": 4, "max_tokens": 4},
}


def train(folder, **overrides):
    result = forge.train(None, name="run", run={"root": str(folder)}, **{**SETTINGS, **overrides})
    assert len({row["train/grad_norm"] for row in result.metrics if "train/grad_norm" in row}) > 1
    return result


def lines_of(*ideas):
    return sum(len([line for line in inspect.getsource(idea).splitlines() if line.strip()]) for idea in ideas)


class Decayed(GRPO):
    """Idea 1: an advantage that decays along the answer, and a further term with its metric."""

    def token_loss(self, ratio, advantages, logprobs, positions, tokens):
        forge.log("mine/token", tokens.double().mean())
        later = 0.9**positions
        return -ratio * advantages * later + 0.01 * logprobs.exp() * logprobs


def test_custom_credit_assignment_and_loss_term_fit_in_20_lines(tmp_path):
    history = train(tmp_path, algorithm=Decayed(), reward="CharacterMatch").metrics
    assert lines_of(Decayed) <= 20
    assert all(row["mine/token"] > 0 for row in history[1:])


async def duel(client, task):
    """Idea 2: two policies against one another; the longer answer wins."""
    lengths = {}
    for player in ("policy", "rival"):
        messages = [{"role": "user", "content": task.prompt.text}]
        answer = await client.chat.completions.create(model=player, messages=messages)
        lengths[player] = len(answer.choices[0].message.content or "")
    return {player: float(length == max(lengths.values())) for player, length in lengths.items()}


def test_custom_self_play_of_two_policies_fits_in_20_lines(tmp_path):
    episode = {"template": CHAT, "max_tokens": 32, "agent": {"function": duel}}
    run = train(tmp_path, recipe=SelfPlay, models={"rival": {"trains": True}}, episode=episode, seed=1)
    assert lines_of(duel) <= 20
    assert all("rival/reward" in row and "reward" in row for row in run.metrics[1:])
    assert (run.folder / "model-rival/model.safetensors").exists()


class Easiest(Sampler):
    """Idea 3: a curriculum by success: the shortest word that is not always right."""

    def __init__(self, rows, seed):
        super().__init__(rows, seed)
        self.solved = {}

    def draw(self):
        order = sorted(range(len(self.rows)), key=lambda row: (self.solved.get(str(row), False), row))
        return order[self.random().randrange(2)]

    def observe(self, row, rewards):
        self.solved[str(row)] = bool(rewards) and min(rewards) == 1.0


def test_custom_curriculum_sampler_fits_in_20_lines(tmp_path):
    dataset = SETTINGS["dataset"] | {"sampler": Easiest}
    run = train(tmp_path, dataset=dataset, reward="CharacterMatch", metrics={"rollouts": "all"})
    assert lines_of(Easiest) <= 20
    assert {row["prompt"] for row in run.rollouts} == {"ab>", "ba>"}
