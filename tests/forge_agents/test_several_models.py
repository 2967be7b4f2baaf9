"""Runs with several models: policies that train together, and frozen ones."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

pytest.importorskip("openai")

from apps.selfplay.main import train
from forge.config import ConfigError, build
from forge.models import build_small_model
from forge.observability.rollouts import read_batches
from forge.recipes.rl_config import RLConfig
from forge.types import Episode, Group
from forge_agents.record import EXCLUSIONS
from forge_agents.several import SeveralPoliciesConfig as Several

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("fork_server")]

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '>' }}{% endfor %}"
SETTINGS = {
    "dataset": {"task": "apps.toys.prices:Price", "difficulty": [2, 3]},
    "training": {"batch_size": 2, "steps": 2, "learning_rate": 1e-2, "seq_len": 128, "warmup_steps": 0},
    "grpo": {"n_samples": 4, "max_tokens": 4},
    "eval": {"problems": 0},
    "metrics": {"rollouts": "all"},
    "async": {"max_policy_age": 0},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    small = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1, "max_positions": 64}
    return build_small_model(folder, seed=0, alphabet="0123456789>", **small)


def run(root, model, function, models, name="run", resume=None, **settings):
    """A run of the recipe for several policies; its folder."""
    from forge.recipes.launch import run_recipe

    episode = {"max_tokens": settings.pop("max_tokens", 64), "template": TEMPLATE, "agent": {"function": function}}
    values = {**SETTINGS, "model": str(model), "episode": episode, "models": models, **settings}
    cfg = build(Several, {**values, "run": {"name": name, "root": str(root)}})
    return Path(run_recipe(train, cfg, resume=resume))


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


async def answers(client, sample):
    """Each player says something, and the longer word wins."""
    said = {}
    for player in ("policy", "rival"):
        messages = [{"role": "user", "content": sample.prompt.text}]
        reply = await client.chat.completions.create(model=player, messages=messages)
        said[player] = reply.choices[0].message.content
    longer = float(len(said["policy"]) - len(said["rival"]))
    return {"policy": longer, "rival": -longer}


def rollouts_of(folder):
    columns = ("sample", "origins", "group", "advantage", "dropped", "policy")
    return [row for _, rows in read_batches(folder / "rollouts.arrow", columns) for row in rows.to_pylist()]


def weights(folder):
    return load_file(folder / "model.safetensors")


def differs(first, second):
    return any((first[name] != second[name]).any() for name in first)


@pytest.mark.full
def test_two_policies_train_only_on_tokens_sampled_by_each(tmp_path, model):
    folder = run(tmp_path, model, answers, {"rival": {"trains": True}})
    start, policy, rival = weights(Path(model)), weights(folder / "model"), weights(folder / "model-rival")
    assert differs(start, policy)
    assert differs(start, rival)
    assert differs(policy, rival)
    rows = [row for row in rows_of(folder) if row["step"] > 0]
    for row in rows:
        assert row["reward"] == pytest.approx(-row["rival/reward"])
        assert row["policy_version"] == row["rival/policy_version"] == row["step"]
        for prefix in ("", "rival/"):
            excluded = sum(row.get(f"{prefix}certificate/{name}", 0) for name in EXCLUSIONS)
            assert row[f"{prefix}certificate/sampled"] == row[f"{prefix}certificate/trained"] + excluded > 0
            # The engine and the trainer of each agree: no token was scored by the other's weights.
            assert row[f"{prefix}train/engine_difference"] < 1e-5
    samplers = {
        (row["sample"] < 4, row["policy"], origin[2].partition("[")[0].rstrip("0123456789"))
        for row in rollouts_of(folder)
        for origin in json.loads(row["origins"])
    }
    assert samplers == {(True, "policy", "generator"), (False, "rival", "rival_generator")}


async def uneven(client, sample):
    """The first side always earns more."""
    rewards = await answers(client, sample)
    return {"policy": rewards["policy"] + 10, "rival": rewards["rival"] - 10}


@pytest.mark.full
def test_two_roles_with_one_policy_train_on_both_sides(tmp_path, model):
    folder = run(tmp_path, model, uneven, {"rival": {"seat_of": "policy"}})
    assert differs(weights(Path(model)), weights(folder / "model"))
    assert not (folder / "model-rival").exists()
    for row in rows_of(folder)[1:]:
        assert row["reward"] == pytest.approx(0.0)  # what one side wins, the other loses
        assert not any(name.startswith("rival/") for name in row)
    rows = rollouts_of(folder)
    assert {row["sample"] for row in rows} == set(range(8))
    # Each side is compared with itself: otherwise the first one's advantages would be positive, whatever it says.
    sides = {(row["group"], row["sample"] // 4): [] for row in rows}
    for row in rows:
        sides[row["group"], row["sample"] // 4].append(row["advantage"])
    assert len(sides) == 2 * 2 * 2
    for advantages in sides.values():
        assert sum(advantages) == pytest.approx(0.0, abs=1e-5)
    assert any(any(advantages) for advantages in sides.values())


async def judged(client, sample):
    """The judge's answer decides, of which nothing trains."""
    messages = [{"role": "user", "content": sample.prompt.text}]
    reply = await client.chat.completions.create(model="policy", messages=messages)
    verdict = await client.chat.completions.create(model="judge", messages=messages)
    return float(len(reply.choices[0].message.content) + 10 * len(verdict.choices[0].message.content))


@pytest.mark.full
def test_frozen_model_generates_without_training(tmp_path, model):
    other = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1, "max_positions": 96}
    # Other weights and another vocabulary.
    judge = build_small_model(tmp_path / "judge", seed=3, alphabet=None, **other)
    folder = run(tmp_path, model, judged, {"judge": {"model": str(judge), "template": TEMPLATE}})
    assert differs(weights(Path(model)), weights(folder / "model"))
    last = rows_of(folder)[-1]
    assert last["judge/generator/tokens"] > 0
    assert last["certificate/sampled"] <= last["generator/tokens"]  # the judge's tokens are in no account
    assert not (folder / "model-judge").exists()


@pytest.mark.parametrize(
    ("recipe", "models", "problem"),
    [
        (RLConfig, {"rival": {"trains": True}}, r"models\.rival: this recipe trains one policy; use apps"),
        (Several, {"rival": {"seat_of": "polcy"}}, r"'polcy' is not trained here: name one of policy"),
        (Several, {"policy": {"trains": True}}, r"models\.policy: 'policy' is the run's model"),
        (Several, {"a.b": {"trains": True}}, r"models\.a\.b: 'a\.b' must be of letters"),
        (Several, {"rival": {"trains": True, "seat_of": "policy"}}, r"trains and models\.rival\.seat_of contradict"),
        (RLConfig, {"gpt": {"modle": "x"}}, r"unknown key 'models\.gpt\.modle'; did you mean 'model'"),
        (RLConfig, {"gpt": 3}, r"models\.gpt must be a mapping"),
    ],
)
def test_invalid_models_section_raises_one_line_error(recipe, models, problem):
    episode = {"agent": {"function": answers}}
    with pytest.raises(ConfigError, match=problem) as caught:
        build(recipe, {**SETTINGS, "model": "x", "episode": episode, "models": models})
    assert "\n" not in str(caught.value)


def test_group_has_signal_if_rewards_of_one_policy_differ():
    def episode(policy, reward):
        made = Episode(prompt_ids=[1], response_ids=[2], reward=reward)
        made.policy = policy
        return made

    pairs = [("policy", 1.0), ("policy", 1.0), ("rival", 0.0), ("rival", 0.0)]
    group = Group([episode(*pair) for pair in pairs])
    assert not group.has_signal
    assert [episode.reward for episode in group.of("rival").episodes] == [0.0, 0.0]
    assert Group([*group.episodes, episode("rival", 1.0)]).has_signal
    assert not Group([episode("", 1.0), episode("", 1.0)]).has_signal
    assert Group([episode("", 1.0), episode("", 0.0)]).has_signal
