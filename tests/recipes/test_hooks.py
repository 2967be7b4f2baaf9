"""Hooks, loops of one's own, and samplers, in whole runs."""

import hashlib
from pathlib import Path

import pytest

import forge
from forge.config import ConfigError
from forge.observability.rollouts import read_batches
from forge.recipes.rl import Loop
from forge_envs.samplers import Retire

pytestmark = pytest.mark.processes

WORDS = ["ab", "cd", "ef", "gh", "abc", "def", "ghi", "jkl"]
ROWS = [{"question": word, "answer": word[::-1], "level": len(word)} for word in WORDS]
SETTINGS = {
    "from_scratch": {"alphabet": "abcdefghijkl>", "hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1},
    "dataset": {"path": ROWS, "prompt_template": "{question}>"},
    "reward": "CharacterMatch",
    "training": {"batch_size": 2, "steps": 8, "learning_rate": 1e-2, "seq_len": 128},
    "grpo": {"n_samples": 4, "max_tokens": 4},
    "async": {"max_policy_age": 0},
}


def train(folder, name="run", **overrides):
    settings = SETTINGS | {"run": {"root": str(folder)}} | overrides
    settings["run"] = {"root": str(folder)}
    return forge.train(None, name=name, **settings)


def test_training_hook_logs_metrics_and_stops_run_cleanly(tmp_path):
    steps = []
    groups_of = {}

    def on_step(step, metrics):
        steps.append(step)
        forge.log("mine/step", step)
        forge.log("mine/twice", 1.0, "sum")
        forge.log("mine/twice", 2.0, "sum")
        return step == 3 and metrics["reward"] >= 0.0

    async def on_rollouts(step, groups):
        groups_of[step] = [episode.reward for group in groups for episode in group.episodes]

    result = train(
        tmp_path, on_step=on_step, on_rollouts=on_rollouts, eval_dataset=ROWS, checkpoint={"every": 2}, sync_interval=1
    )
    history = result.metrics
    assert [row["step"] for row in history] == steps == [0, 1, 2, 3]
    assert [row["mine/step"] for row in history] == steps
    assert {row["mine/twice"] for row in history} == {3.0}
    assert [step for step in steps if "eval/accuracy" in history[step]] == [0, 3]
    for step in (1, 2, 3):
        assert history[step]["reward"] == pytest.approx(sum(groups_of[step]) / 8)
    assert (result.folder / "checkpoints/step_000003").is_dir()
    assert (result.folder / "model/model.safetensors").exists()
    assert (result.folder / "finished").exists()


def test_failing_training_hook_ends_run_with_hook_error(tmp_path):
    def on_step(step, metrics):
        if step == 2:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        train(tmp_path, on_step=on_step)
    assert "enough" in (tmp_path / "run/ended.txt").read_text()


@pytest.mark.parametrize(
    ("hooks", "problem"),
    [
        ({"on_step": 5}, "on_step must be a function of two arguments, got 5"),
        ({"on_rollouts": "mine"}, "on_rollouts must be a function of two arguments, got 'mine'"),
        ({"recipe": "mine"}, "recipe must be a subclass of forge.recipes.rl.Loop or `async def recipe"),
        ({"recipe": lambda cfg, job: None}, "recipe must be a subclass"),
    ],
)
def test_invalid_training_hooks_raise(tmp_path, hooks, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        train(tmp_path, **hooks)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


class Replay(Loop):
    """A second update of each step, on the groups of the step before."""

    earlier = None

    async def train_step(self, groups, version):
        metrics = await super().train_step(groups, version)
        if self.earlier is not None:
            batch = await self.make_batch(self.earlier, version, [])
            again = await self.parts.trainer.train_step.route(batch, same_step=True)
            metrics |= {f"again/{name}": value for name, value in again.items()}
        self.earlier = groups
        return metrics


def test_groups_trained_again_do_not_advance_step_or_schedule(tmp_path):
    settings = {"async": {"max_policy_age": 0, "max_training_age": 1}, "schedule": "linear"}
    history = train(tmp_path, recipe=Replay, **settings).metrics
    plain = train(tmp_path, "plain", schedule="linear").metrics
    assert [row["step"] for row in history] == list(range(9))
    replayed = [row for row in history if "again/train/loss" in row]
    assert len(replayed) == 7
    for row, reference in zip(history[1:], plain[1:], strict=True):
        # The schedule is that of the steps, and the age of what was sampled stays.
        assert row["train/learning_rate"] == reference["train/learning_rate"]
        assert row.get("again/train/learning_rate", row["train/learning_rate"]) == row["train/learning_rate"]
        assert row["train/on_policy"] == 1.0
    assert all(row["again/train/on_policy"] == 0.0 for row in replayed)
    assert history[8]["train/loss"] != plain[8]["train/loss"]


async def two_steps(cfg, job):
    from forge.recipes.components import start_rl

    parts = await start_rl(cfg, job, cfg.load_algorithm())
    loop = Loop(cfg, job, parts)
    await loop.publish(0)
    for version in range(2):
        samples = [await parts.dataset.sample.route() for _ in range(cfg.training.batch_size)]
        for sample in samples:
            await loop.rollout(sample)
        groups = await parts.buffer.sample.route(version, cfg.training.batch_size)
        metrics = await loop.train_step(groups, version)
        loop.version = version + 1
        await loop.publish(version + 1)
        await job.end_step(cfg, parts.state, version + 1, metrics, loop.evaluate)
    await loop.export()


def test_custom_recipe_records_complete_run(tmp_path):
    result = train(tmp_path, recipe=two_steps)
    assert [row["step"] for row in result.metrics] == [1, 2]
    assert len({row["train/loss"] for row in result.metrics}) == 2
    assert (result.folder / "model/model.safetensors").exists()
    assert result.rollouts


def prompts(folder: Path) -> list[tuple[int, int, str, float]]:
    """(step, group, prompt, reward) of all samples that trained."""
    rows = []
    for _, batch in read_batches(folder / "rollouts.arrow", ("step", "group", "prompt", "reward")):
        rows += [(row["step"], row["group"], row["prompt"], row["reward"]) for row in batch.to_pylist()]
    return rows


@pytest.mark.parametrize(
    ("sampler", "ends"),
    [
        pytest.param({"use": "frontier", "memory": 1.0}, (2, 3, 6, 9), marks=pytest.mark.slow, id="frontier"),
        pytest.param(Retire, (2, 3, 6, 9), marks=pytest.mark.slow, id="retire"),
        pytest.param(Retire, (3, 7), id="retire twice"),
    ],
)
@pytest.mark.full
def test_resumed_run_with_row_sampler_uses_the_same_rows(tmp_path, sampler, ends):
    settings = {
        "dataset": SETTINGS["dataset"] | {"sampler": sampler},
        "checkpoint": {"every": 1},
        "metrics": {"rollouts": "all"},
        # Every character is right in some answers of a row: the sampler has something to learn.
        "reward": "CharacterMatch",
        "steps": 10,
    }
    whole = train(tmp_path, "whole", **settings)
    for end in ends:

        def interrupted(step, metrics, end=end):
            if step == end + 1:
                raise KeyError(f"interrupted after step {end}")

        with pytest.raises(KeyError, match="interrupted"):
            train(tmp_path, "resumed", on_step=interrupted, resume="auto", **settings)
    resumed = train(tmp_path, "resumed", resume="auto", **settings)
    assert prompts(resumed.folder) == prompts(whole.folder)
    assert len({reward for *_, reward in prompts(whole.folder)}) > 1
    digests = {
        hashlib.sha256(Path(run.model, "model.safetensors").read_bytes()).hexdigest() for run in (whole, resumed)
    }
    assert len(digests) == 1


@pytest.mark.full
def test_each_evaluation_set_keeps_separate_settings(tmp_path):
    sets = {
        "short": {"path": ROWS[:4], "problems": 4, "every": 2, "n": 4, "sampling": {"max_tokens": 3}},
        "copies": {"path": ROWS, "problems": 3},
    }
    evaluation = {"every": 4, "sets": sets, "best": "eval/short/pass@4"}
    result = train(tmp_path, eval_dataset=ROWS[:2], eval=evaluation, checkpoint={"every": 0})
    history = result.metrics

    def steps_of(name):
        return [int(row["step"]) for row in history if name in row]

    assert steps_of("eval/accuracy") == [0, 4, 8]
    assert steps_of("eval/short/pass@4") == steps_of("eval/short/maj@4") == [0, 2, 4, 6, 8]
    assert steps_of("eval/copies/accuracy") == [0, 4, 8]
    assert not {"eval/pass@4", "eval/copies/maj@1"} & history[0].keys()
    for row in history:
        assert row.get("eval/short/accuracy", 0.0) <= row.get("eval/short/pass@4", 0.0)
    # All answers are kept.
    answers = [answer for answer in result.held_out if answer["step"] == 4]
    assert [(a.get("set", ""), a["problem"]) for a in answers] == [
        *(("", number) for number in range(2)),
        *(("short", number) for number in range(4) for _ in range(4)),
        *(("copies", number) for number in range(3)),
    ]
    assert all(a["tokens"] <= 3 for a in answers if a.get("set") == "short")
    assert (result.folder / "best/model.safetensors").exists()
    assert forge.Result(str(result.folder)).metrics == history


@pytest.mark.parametrize(
    ("evaluation", "problem"),
    [
        ({"sets": {"a": {"problems": 3}}}, "needs a path, or a dataset with a task"),
        ({"sets": {"a": {"path": ROWS, "problems": 30}}}, "eval.sets.a: .*30 held-out samples are needed, but only 8"),
        ({"sets": {"accuracy": {"path": ROWS}}}, "'accuracy' is an invalid name"),
        ({"sets": {"a": {"path": ROWS, "problems": 2, "every": 3}}, "sync": 2}, "multiple of training.sync_interval"),
        ({"sets": {"a": {"path": ROWS, "problems": 2, "dataset": {"promt_template": "x"}}}}, "promt_template"),
        ({"n": 4, "sampling": {"temperature": 0.0}}, "all n = 4 answers would be equal"),
        ({"sampling": {"temprature": 0.5}}, "unknown setting 'temprature'; did you mean 'temperature'"),
        ({"best": "eval/accuracy"}, "eval.best has no effect"),
    ],
)
def test_invalid_evaluate_function_raises_one_line_error(tmp_path, evaluation, problem):
    interval = evaluation.pop("sync", 1)
    with pytest.raises((ConfigError, ValueError), match=problem) as caught:
        train(tmp_path, eval=evaluation, sync_interval=interval, **{"async": {"max_policy_age": 2}})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
