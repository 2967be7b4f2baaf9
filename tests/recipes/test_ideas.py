"""Six ideas of a researcher, each in at most 20 lines over the public interface."""

import inspect

import pytest

pytest.importorskip("openai")

import forge
from apps.selfplay.main import SelfPlay
from forge.actors import Generator
from forge.algorithms import GRPO
from forge_envs import ToolEnvironment
from forge_envs.samplers import Sampler
from forge_envs.tools import Toolbox
from tests.recipes.test_hooks import Replay

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


def test_an_algorithm_with_its_own_credit_and_term(tmp_path):
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


def test_two_policies_against_one_another(tmp_path):
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


def test_a_curriculum(tmp_path):
    dataset = SETTINGS["dataset"] | {"sampler": Easiest}
    run = train(tmp_path, dataset=dataset, reward="CharacterMatch", metrics={"rollouts": "all"})
    assert lines_of(Easiest) <= 20
    assert {row["prompt"] for row in run.rollouts} == {"ab>", "ba>"}


class Judge:
    """Idea 4, first half: a judge with its own model, started with the first answer."""

    def __init__(self):
        self.model = None

    async def __call__(self, response, target, judge_model):
        if self.model is None:
            self.model = await Generator.options(mesh_name="judge").as_service(judge_model)
        verdicts = await self.model.generate.route(f"{response}>{target}", n=2, max_tokens=1)
        return sum(verdict.text == "a" for verdict in verdicts) / 2 + 0.1 * len(set(response))


@pytest.mark.slow
def test_a_judge_with_its_own_model(tmp_path):
    sizes = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1, "max_positions": 64}
    judge = forge.models.build_small_model(tmp_path / "judge", seed=1, alphabet="abc>", **sizes)
    rows = [row | {"judge_model": judge} for row in ROWS]
    history = train(tmp_path, dataset=SETTINGS["dataset"] | {"path": rows}, reward=Judge()).metrics
    assert lines_of(Judge) <= 20
    assert any(row["reward/std"] > 0 for row in history[1:])


class Counter(ToolEnvironment):
    """Idea 4, second half: tools with a state for each episode, which the reward reads."""

    def __init__(self):
        self.calls = 0
        super().__init__(Toolbox(self.press), self.judged)

    def press(self) -> str:
        """Press the button."""
        self.calls += 1
        return "pressed"

    def judged(self, response, env):
        return float(env.calls) + 0.1 * len(set(response))


def test_tools_with_a_state(tmp_path):
    history = train(tmp_path, environment=Counter, episode={"template": CHAT, "max_tokens": 64}).metrics
    assert lines_of(Counter) <= 20
    assert any(row["reward/std"] > 0 for row in history[1:])


def test_two_evaluations_and_pass_at_k(tmp_path):
    """Idea 5: settings alone."""
    sets = {
        "short": {"path": ROWS[:2], "problems": 2, "every": 1, "n": 4},
        "long": {"path": ROWS[2:], "problems": 4, "every": 2, "n": 8},
    }
    history = train(tmp_path, reward="CharacterMatch", eval={"sets": sets}).metrics
    assert [row["step"] for row in history if "eval/short/pass@4" in row] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in history if "eval/long/pass@8" in row] == [0, 2, 4]


def test_replay_callback_early_end_and_metric(tmp_path):
    """Idea 6: a second update on the groups of the step before; a callback, an early end and a metric besides."""

    def on_step(step, metrics):
        forge.log("mine/step", step)
        return step == 3

    ages = {"max_policy_age": 0, "max_training_age": 1}
    run = train(tmp_path, recipe=Replay, on_step=on_step, reward="CharacterMatch", **{"async": ages})
    assert lines_of(Replay, on_step) <= 20
    assert [row["mine/step"] for row in run.metrics] == [0, 1, 2, 3]
