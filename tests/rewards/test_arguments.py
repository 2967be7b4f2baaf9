"""Each parameter of a reward gets what it names: the answer, the prompt, columns of the row, or the whole group."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from forge.data.prompts import PromptDataset
from forge.envs.group import SingleTurnEnv
from forge.models.tokenizer import character_tokenizer
from forge.observability.metrics import drain
from forge.recipes.reward_config import RewardConfig
from forge.rewards.arguments import MissingColumn
from forge.rewards.reward import Reward, as_verifier
from forge.training import credit
from forge.types import Completion, Episode, Prompt, Sample
from tests.actors.respawn import started

ROW = {"prompt": "2+2", "answer": "4", "solution": "four", "level": 3}
TEXT = Prompt("2+2", (1, 2), 0, ROW)
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2"}]
CHAT = Prompt("<rendered>", (1, 2), 0, ROW | {"prompt": TALK}, tuple(TALK), True)
RESPONSES = ["4", "four apples", ""]
COMPLETIONS = [Completion(text, [7] * (len(text) + 1), [-0.5] * (len(text) + 1), finish="stop") for text in RESPONSES]


def scored(*functions: Any, prompt: Prompt = TEXT, **settings: Any) -> list[float | None]:
    reward = Reward(functions, **settings)
    return [score.reward for score in asyncio.run(reward.score(prompt, RESPONSES, "4", COMPLETIONS))]


def test_reward_parameters_are_filled_by_name():
    def by_name(response: str, solution: str, level: int, target: str, prompt: str) -> float:
        assert (solution, level, target, prompt) == ("four", 3, "4", "2+2")
        return float(response.startswith(solution)) + 0.5 * (response == target)

    assert scored(by_name) == [0.5, 1.0, 0.0]
    assert scored(lambda response, missing=7: missing) == [7.0, 7.0, 7.0]
    assert scored(lambda response, level=7: level) == [3.0, 3.0, 3.0]
    assert scored(lambda response, **columns: len(columns)) == [3.0] * 3  # the prompt is the rendered one, if named


def test_plural_reward_parameters_receive_the_whole_group():
    def shortest(responses: list[str], level: int, prompt: str) -> list[float]:
        assert (level, prompt) == (3, "2+2")
        return [float(len(response) == min(map(len, responses))) for response in responses]

    async def longest(responses: list[str], completions: list[Completion]) -> list[float]:
        return [float(len(c.token_ids) == max(len(d.token_ids) for d in completions)) for c in completions]

    assert (scored(shortest), scored(longest)) == ([0.0, 0.0, 1.0], [0.0, 1.0, 0.0])


def test_trl_reward_functions_run_unchanged():
    def accuracy_reward(completions, solution, **kwargs):
        assert (kwargs["prompts"], kwargs["level"]) == (["2+2"] * 3, [3, 3, 3])
        assert kwargs["completion_ids"][0] == [7, 7]
        return [float(text.startswith(truth)) for text, truth in zip(completions, solution, strict=True)]

    async def later(prompts, completions, completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    def conversational(completions, prompts, answer, **kwargs):
        assert prompts == [TALK] * 3
        return [float(c[0]["content"] == truth) for c, truth in zip(completions, answer, strict=True)]

    assert (scored(accuracy_reward), scored(later)) == ([0.0, 1.0, 0.0], [2.0, 12.0, 1.0])
    assert scored(conversational, prompt=CHAT) == [1.0, 0.0, 0.0]


def test_verl_reward_functions_and_rows_run_unchanged():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert (data_source, extra_info) == ("gsm8k", {"index": 7})
        return {"score": float(solution_str == ground_truth), "length": len(solution_str)}

    row = {"data_source": "gsm8k", "prompt": "2+2", "ability": "math", "extra_info": {"index": 7}}
    data = [row | {"reward_model": {"style": "rule", "ground_truth": "4"}}]
    sample = next(rows(compute_score, data))
    assert sample.target == "4"
    scores = asyncio.run(Reward([compute_score]).score(sample.prompt, RESPONSES, "4"))
    assert [score.reward for score in scores] == [1.0, 0.0, 0.0]
    # Metrics of what is trained, not of evaluations as well.
    assert [score.extras for score in scores] == [{"length": 1.0}, {"length": 11.0}, {"length": 0.0}]
    drain()
    credit.record_rollouts([Episode(COMPLETIONS[0], 1.0, info={"extras": scores[0].extras})])
    assert drain().values()["reward/length"] == 1.0


def test_log_metric_argument_of_trl_rewards_records_metric():
    drain()

    def counted(completions, log_metric, log_extra, **kwargs):
        log_metric("words", 3.0)
        log_extra("solution", ["x"] * len(completions))
        return [0.0] * len(completions)

    assert scored(counted) == [0.0] * 3
    assert drain().values()["words"] == 3.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda answer: 0.0,
            r"has no parameter for the response: name its parameters prompt, response, target, completion",
        ),
        (lambda question, solution, level: 0.0, "has no parameter for the response"),
        (lambda completions, trainer_state, **kwargs: [], "trainer_state, which only TRL provides"),
    ],
)
def test_uncallable_reward_raises_one_line_error(function, message):
    with pytest.raises(ValueError, match=message) as caught:
        as_verifier(function)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completions, **kwargs: 1.0, "gave 1.0: give a list of 3 numbers"),
        (lambda responses: [1.0], "must return 3 scores, one a response, got 1"),
        (lambda responses: ["good", 1.0, 1.0], "gave 'good': give a finite number"),
        (lambda completions, **kwargs: {"a": 1.0}, "give a list of 3 numbers"),
    ],
)
def test_group_reward_of_wrong_length_raises(function, message):
    with pytest.raises(ValueError, match=message):
        scored(function)


def test_missing_reward_column_error_names_column_and_row_keys():
    def wants(response, difficulty):
        return 0.0

    with pytest.raises(
        MissingColumn, match="the reward wants has a parameter 'difficulty', but the row has only prompt"
    ):
        scored(wants)


def rows(reward: Any, data: list[dict[str, Any]], **settings: Any) -> PromptDataset:
    from forge.data.config import DatasetConfig
    from forge.data.files import Rows

    section = RewardConfig(functions=[reward]).with_columns(DatasetConfig(path=Rows(data), **settings))
    return PromptDataset(**{**section, "path": Rows(data)}, tokenizer=character_tokenizer(), seed=0)


def test_missing_reward_columns_raise_when_data_loads():
    data = [{"question": "1+1", "solution": "2", "level": 1}, {"question": "1+2", "solution": "3"}]
    sample = next(rows(lambda response, solution: 0.0, data))
    assert sample.prompt.row == {"solution": sample.target}
    with pytest.raises(
        ValueError,
        match="row 2: the reward has a parameter 'level', but the data has no such column; it has question, solution",
    ):
        rows(lambda response, level: 0.0, data)
    with pytest.raises(ValueError, match=r"row 1: the reward has a parameter 'solutio', .*; did you mean 'solution'"):
        rows(lambda response, solutio: 0.0, data)
    # Without a default that says what stands for it, a row may lack a column.
    assert [sample.prompt.row for sample in rows(lambda response, level=0: 0.0, data).held_out(2)] == [{"level": 1}, {}]
    assert next(rows(lambda completions, **kwargs: [], data, shuffle=False)).prompt.row == data[0]


class Policy:
    """Answers every prompt with the same texts; keeps what it was given."""

    def __init__(self) -> None:
        self.generate = SimpleNamespace(route=self._generate)
        self.prompts: list[Prompt] = []

    async def _generate(self, prompt: Prompt, **sampling: Any) -> list[Completion]:
        self.prompts.append(prompt)
        return COMPLETIONS


def test_reward_receives_row_and_tokens_hidden_from_policy():
    from forge.actors import RewardActor

    def both(completion: Completion, level: int) -> float:
        return level + len(completion.token_ids)

    policy, service = Policy(), SimpleNamespace(score=SimpleNamespace(route=started(RewardActor([both])).score))
    env = SingleTurnEnv(service, with_tokens=RewardConfig(functions=[both]).reads_tokens)
    episodes = asyncio.run(env.rollout(policy, Sample(TEXT, "4"), n=3))
    assert [episode.reward for episode in episodes] == [5.0, 15.0, 4.0]
    assert policy.prompts[0].row == {}
    assert not RewardConfig(functions=[lambda response: 0.0]).reads_tokens
