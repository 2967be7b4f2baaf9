"""Episodes: who says what when, why they end, and what is never counted as a failure of the policy."""

import asyncio

import pytest

from forge.types import Prompt, Sample
from forge_envs import Dialogue, Environment, InfrastructureError, Step, Toolbox, ToolEnvironment, rollout


class Chat(Environment):
    """Says what it is told to: one step after the other, and the last one again for ever."""

    def __init__(self, *steps, first="who jumps?"):
        self.steps, self.first = list(steps), first
        self.actions, self.resets, self.closed = [], [], 0

    async def reset(self, task, *, seed):
        self.resets.append((task, seed))
        self.turn = 0
        return Step(({"role": "user", "content": self.first},))

    async def step(self, action):
        self.actions.append(action)
        step = self.steps[min(self.turn, len(self.steps) - 1)]
        self.turn += 1
        if isinstance(step, Exception):
            raise step
        return await step() if callable(step) else step

    async def close(self):
        self.closed += 1


def says(text, **more):
    return Step(({"role": "user", "content": text},), **more)


@pytest.fixture
def dialogue(bpe):
    return Dialogue(bpe, "chatml")


def play(policy, env, dialogue, **limits):
    return asyncio.run(rollout(policy, env, "a task", dialogue=dialogue, **limits))


def check(episode):
    """What holds of every episode."""
    assert len(episode.tokens) == len(episode.mask) == len(episode.logprobs) == len(episode.versions)
    for own, logprob, version in zip(episode.mask, episode.logprobs, episode.versions, strict=True):
        assert own == (version >= 0)
        assert own or logprob == 0.0
    covered = [t for turn in episode.turns for t in range(turn.start, turn.end)]
    assert covered == [t for t, own in enumerate(episode.mask) if own]


def test_two_turn_episode_has_expected_tokens_and_rewards(scripted, dialogue, bpe):
    policy = scripted("the dog", "the fox")
    env = Chat(says("no", reward=-0.25), Step(reward=1.0, terminated=True))
    episode = play(policy, env, dialogue, seed=7)
    check(episode)
    assert bpe.decode(episode.tokens) == (
        "<|im_start|>user\nwho jumps?<|im_end|>\n<|im_start|>assistant\nthe dog<|im_end|>\n"
        "<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\nthe fox<|im_end|>"
    )
    assert [bpe.decode(episode.tokens[t.start : t.end]) for t in episode.turns] == [
        "the dog<|im_end|>",
        "the fox<|im_end|>",
    ]
    assert [turn.reward for turn in episode.turns] == [-0.25, 1.0]
    assert [(turn.version, turn.finish) for turn in episode.turns] == [(3, "stop")] * 2
    assert (episode.reward, episode.info["stop"]) == (0.75, "terminated")
    assert [action.text for action in env.actions] == ["the dog", "the fox"]
    assert (env.resets, env.closed) == ([("a task", 7)], 1)
    assert policy.asked[1]["tokens"] == episode.tokens[: episode.turns[1].start]


@pytest.mark.parametrize(
    ("steps", "limits", "stop", "turns"),
    [
        ([says("go on", reward=0.5)], {"max_turns": 3}, "max_turns", 3),
        ([says("go on", reward=0.5)], {"max_tokens": 45}, "max_tokens", 2),
        ([Step(reward=0.5, truncated=True)], {}, "truncated", 1),
    ],
)
def test_endless_environment_episode_stops_at_limit_and_keeps_rewards(scripted, dialogue, steps, limits, stop, turns):
    episode = play(scripted(*["the fox"] * 9), Chat(*steps), dialogue, **limits)
    check(episode)
    assert (episode.info["stop"], len(episode.turns), episode.reward) == (stop, turns, 0.5 * turns)
    assert episode.mask[-1]  # nothing after the last turn is kept: nothing can be learnt from it


def test_turn_cut_at_token_limit_is_marked_truncated_and_closed(scripted, dialogue, bpe):
    env = Chat(says("go on"), Step(terminated=True))
    episode = play(scripted(("the quick brown fox", "length"), "end"), env, dialogue, max_turn_tokens=2)
    check(episode)
    assert env.actions[0].truncated
    assert not env.actions[1].truncated
    first = episode.turns[0]
    assert first.finish == "length"
    assert first.end - first.start == 2
    assert episode.tokens[first.end] == dialogue.stop_ids[0]
    assert not episode.mask[first.end]


def test_lost_environment_is_retried_then_episode_is_unscored(scripted, dialogue):
    env = Chat(InfrastructureError("the server is gone"))
    episode = play(scripted(*["the fox"] * 3), env, dialogue, retries=2)
    check(episode)
    assert episode.reward is None
    assert episode.info["stop"] == "infrastructure"
    assert "the server is gone" in episode.info["error"]
    assert (len(env.resets), env.closed, episode.info["attempts"]) == (3, 3, 3)

    env = Chat(InfrastructureError("the server is gone"), says("go on"))
    env.steps = [InfrastructureError("once")]

    async def reset(task, *, seed, ask=env.reset):
        if env.closed:
            env.steps = [Step(reward=1.0, terminated=True)]
        return await ask(task, seed=seed)

    env.reset = reset
    episode = play(scripted("the dog", "the fox"), env, dialogue)
    assert (episode.reward, episode.info["attempts"]) == (1.0, 2)
    assert "error" not in episode.info
    assert len(episode.turns) == 1


def test_environment_exception_reaches_caller_and_names_task(scripted, dialogue):
    env = Chat(KeyError("score"))
    with pytest.raises(KeyError, match="score") as caught:
        play(scripted("the fox"), env, dialogue)
    assert "while Chat was played on task 'a task'" in caught.value.__notes__[0]
    assert env.closed == 1
    with pytest.raises(TimeoutError, match="its own"):
        play(scripted("the fox"), Chat(TimeoutError("its own")), dialogue)


def test_environment_turn_without_score_leaves_episode_unscored(scripted, dialogue):
    episode = play(scripted("a", "b"), Chat(says("on", reward=None), Step(reward=1.0, terminated=True)), dialogue)
    assert episode.reward is None
    assert len(episode.turns) == 2


def test_rewritten_message_history_starts_a_branch(scripted, dialogue, bpe):
    anew = Step(({"role": "user", "content": "so far: a dog. who jumps?"},), reward=0.25, rewritten=True)
    policy = scripted("the dog", "a cat", "the fox")
    episode = play(policy, Chat(says("no", reward=0.5), anew, Step(reward=1.0, terminated=True)), dialogue)
    (first,) = episode.branches
    check(first)
    check(episode)
    assert bpe.decode(episode.tokens) == (
        "<|im_start|>user\nso far: a dog. who jumps?<|im_end|>\n<|im_start|>assistant\nthe fox<|im_end|>"
    )
    assert [turn.reward for turn in first.turns] == [0.5, 0.25]
    assert (first.reward, episode.reward, episode.outcome) == (1.75, 1.0, 1.75)  # what was still to come


def test_rollout_sampling_settings_reach_policy(scripted, dialogue):
    policy = scripted("a")
    play(policy, Chat(Step(terminated=True)), dialogue, temperature=0.5, max_turn_tokens=7)
    assert (policy.asked[0]["temperature"], policy.asked[0]["max_tokens"]) == (0.5, 7)


def test_tool_episode_returns_results_and_errors_to_policy(scripted, bpe):
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def right(prompt, response, target):
        return float(response == target)

    env = ToolEnvironment(Toolbox(add), right, system="Be brief.", turn_reward=-0.125)
    task = Sample(Prompt("12 + 34 + 1?", (1,)), "47")
    policy = scripted(
        '<tool_call>{"name": "add", "arguments": {"a": 12, "b": 34}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 46}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 46}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 46, "b": 1}}</tool_call>',
        "47",
    )
    episode = asyncio.run(rollout(policy, env, task, dialogue=Dialogue(bpe, "chatml")))
    answers = [m["content"] for m in episode.info["messages"] if m["role"] == "tool"]
    assert answers[0] == "46"
    assert "cannot be read" in answers[1]
    assert (answers[2], answers[3]) == ("error: add: missing b", "47")
    assert (episode.reward, episode.info["calls"], episode.info["unread_calls"]) == (0.5, 3, 1)
    assert '"name": "add"' in bpe.decode(episode.tokens[: episode.turns[0].start])
    check(episode)


def test_non_finite_environment_reward_raises(scripted, dialogue):
    with pytest.raises(ValueError, match=r"finite or None .*, got nan"):
        play(scripted("a"), Chat(Step(reward=float("nan"), terminated=True)), dialogue)
