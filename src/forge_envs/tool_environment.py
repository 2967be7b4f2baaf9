"""An environment of a question, tools, and an answer that is scored."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from forge.data.prompts import QUESTION_FIELDS
from forge.rewards.arguments import Answers, RewardCall
from forge.types import Prompt, Sample

from .environment import Action, Environment, Message, Step
from .schemas import Schema
from .tools import Toolbox


class ToolEnvironment(Environment):
    """The policy may call tools in every turn; the first turn without a call is the answer and ends the episode. A
    truncated answer has reward 0.

    Args:
        tools: the available tools.
        score: a reward, plain or async, whose parameters get what they name: `response` (the answer), `prompt`,
            `target`, columns of the row, `messages` (the whole conversation, with calls and their results), `env` (this
            environment) and `state`.
        system: a system message before the question.
        turn_reward: for each turn that calls a tool; negative to penalise calls.
        state: the world that the tools of this episode change, for `score`.

    Raises:
        ValueError: the score takes other arguments, or scores groups.
    """

    def __init__(
        self,
        tools: Toolbox,
        score: Callable[..., Any],
        *,
        system: str | None = None,
        turn_reward: float = 0.0,
        state: Any = None,
    ) -> None:
        self.tools, self.score, self.system, self.turn_reward = tools, score, system, turn_reward
        self.state = state
        self.messages: list[Message] = []
        self._call = RewardCall(score, getattr(score, "__name__", type(score).__name__))
        if self._call.form == "group":
            raise ValueError(f"{self._call.name} scores a group, and an environment plays one episode: name response")

    @property
    def offered(self) -> tuple[Schema, ...]:
        """The schemas of the tools."""
        return self.tools.schemas

    async def reset(self, task: Sample | Mapping[str, Any] | str, *, seed: int) -> Step:
        """The question, with the system message and the schemas of the tools.

        Args:
            task: a sample; of clients of a server a question, or a mapping with a question and an answer.

        Raises:
            ValueError: it has no question.
        """
        self.task = task if isinstance(task, Sample) else _sample(task)
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        self.messages = [*system, {"role": "user", "content": self.task.prompt.text}]
        return Step(tuple(self.messages), tools=self.tools.schemas)

    async def step(self, action: Action) -> Step:
        """Answer tool calls, or score the answer."""
        # A call is answered, also a malformed one; text alone is the answer to the question.
        if action.calls or action.errors:
            answers = await self.tools.answer(action)
            self.messages += [{"role": "assistant", "content": action.text}, *answers]
            return Step(tuple(answers), self.turn_reward)
        if action.truncated:
            return Step(truncated=True)
        prompt, target = self.task
        if self._call.form == "positional":
            reward = self.score(prompt.text, action.content, target)
        else:
            row = {**prompt.row, "env": self, "state": self.state}
            answers_given = Answers(prompt.text, [action.content], target, row, self.messages)
            reward = self.score(**self._call.arguments(answers_given, 0))
        return Step(reward=await reward if inspect.isawaitable(reward) else reward, terminated=True)


def _sample(task: Mapping[str, Any] | str) -> Sample:
    # A client of a server sends plain JSON; the tokens of the prompt are the policy's.
    row = task if isinstance(task, Mapping) else {"question": task}
    question = next((row[name] for name in QUESTION_FIELDS if name in row), None)
    target = row.get("answer", row.get("target", ""))
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"a task must be a question, or a mapping with a question and an answer, not {task!r:.80}")
    return Sample(Prompt(question, ()), target if isinstance(target, str) else str(target))
