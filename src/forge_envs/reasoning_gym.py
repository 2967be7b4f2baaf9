"""reasoning-gym tasks: one question, one answer, a score."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from forge.rewards.verifier import Unscored
from forge_envs.environment import Action, Environment, Step, user_message
from forge_verifiers.threads import in_own_thread

try:
    import reasoning_gym
except ImportError as error:
    raise ImportError("reasoning-gym tasks need reasoning-gym: pip install reasoning-gym") from error

# Families whose scorers were found to reward wrong answers.
UNRELIABLE = {
    "complex_arithmetic": 'the answer "nan" scores 1',
    "game_of_life_halting": "unreadable answers score 1",
    "coin_flip": 'the answer "0" scores near 1',
}
_DIVISION = 'some labels of divisions are wrong; take operators=["+", "-", "*"]'
# Scorers that compare numbers by a tolerance accept these for any number.
_NOT_FINITE = re.compile(r"(?<![a-z])(nan|inf|infinity)(?=j?(?![a-z]))", re.IGNORECASE)
# An answer that is right for no question.
_NONSENSE = "?!~ no answer ~!?"
_SCORE_LIMIT = 10.0  # seconds for one score
_MAX_SURPLUS = 10_000  # characters of an answer beyond ten times the right one's: scorers are not of linear time

Entry = Mapping[str, Any]  # of a dataset: its question and answer, and metadata of its family


class ReasoningGymEnvironment(Environment):
    """The task of an episode is the index of a question, or None to pick one by the seed.

    Answers are scored by the family's scorer, with guards: "nan" and "inf" score 0 unless they are right, and so do
    answers that are far longer than the right one; an answer that breaks the scorer scores 0 if the right answer does
    not. If that breaks it too, or the scorer accepts nonsense, leaves [0, 1] or takes more than 10 s, the episode has
    no reward and `info["unscored"]` has the reason. A turn that was cut at its limit of tokens is not an answer: the
    episode is truncated, with reward 0.

    Args:
        family: such as "gcd".
        size, seed: of the dataset.
        prompt: formats a dataset entry; by default its "question". Small models do better with the payload only.
        answer: extracts the answer from a turn, which it gets without its thoughts; by default all of it.
        allow_wrong: allow a family known to reward wrong answers.
        settings: of the family.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: unknown family or invalid settings, or it rewards wrong answers.
    """

    def __init__(
        self,
        family: str,
        *,
        size: int = 1000,
        seed: int = 0,
        prompt: Callable[[Entry], str] = lambda entry: entry["question"],
        answer: Callable[[str], str] = str.strip,
        allow_wrong: bool = False,
        **settings: Any,
    ) -> None:
        families = reasoning_gym.factory.DATASETS
        if family not in families:
            raise ValueError(f"reasoning-gym has no family {family!r}: it has {', '.join(families)}")
        try:
            dataset: Any = reasoning_gym.create_dataset(family, size=size, seed=seed, **settings)
        except (AssertionError, TypeError) as error:
            raise ValueError(f"{family}: {error}") from error

        # A scorer that gives points for wrong answers teaches them.
        fault = UNRELIABLE.get(family)
        if family == "basic_arithmetic" and "/" in dataset.config.operators:
            fault = _DIVISION
        if fault is not None and not allow_wrong:
            raise ValueError(f"{family} is off: {fault}. Set allow_wrong=True to use it anyway")
        self._family = family
        self._dataset = dataset
        self._prompt = prompt

        self._answer = answer
        self._entry: Entry | None = None

    def __len__(self) -> int:
        """Return number of questions."""
        return len(self._dataset)

    async def reset(self, task: int | None, *, seed: int) -> Step:
        """Ask a question."""
        self._entry = self._dataset[seed % len(self) if task is None else task]
        return Step((user_message(self._prompt(self._entry)),), info={"entry": self._entry})

    async def step(self, action: Action) -> Step:
        """Score the answer, which ends the episode."""
        entry = self._entry
        assert entry is not None, "step before reset"
        if action.truncated:  # the answer did not come
            return Step(truncated=True, info={"entry": entry})
        answer = self._answer(action.answer)
        try:
            reward = await in_own_thread(
                lambda: self._score_answer(answer, entry), limit=_SCORE_LIMIT, name=f"score of {self._family}"
            )
        except Unscored as unscored:
            return Step(reward=None, terminated=True, info={"unscored": str(unscored), "entry": entry})
        return Step(reward=reward, terminated=True, info={"entry": entry})

    def _score_answer(self, answer: str, entry: Entry) -> float:
        expected = entry.get("answer")
        is_long = len(answer) > 10 * len(str(expected)) + _MAX_SURPLUS
        if is_long or (_NOT_FINITE.search(answer) and not _NOT_FINITE.search(str(expected))):
            return 0.0

        try:
            score = float(self._dataset.score_answer(answer, entry))
        except Exception as error:
            if expected is None or not self._accepts_answer(expected, entry):
                raise Unscored(f"the scorer of {self._family} raised {type(error).__name__}: {error}") from error
            return 0.0

        if not math.isfinite(score) or not 0 <= score <= 1:
            raise Unscored(f"the scorer of {self._family} gave {score}")

        # A scorer that accepts nonsense says nothing about this answer.
        if answer != expected and score > 0.5 and self._accepts_answer(_NONSENSE, entry):
            raise Unscored(f"the scorer of {self._family} gives nonsense more than half a point on this question")
        return score

    def _accepts_answer(self, answer: object, entry: Entry) -> bool:
        """Return whether the scorer gives this answer more than half a point."""
        try:
            return float(self._dataset.score_answer(answer, entry)) > 0.5
        except Exception:
            return False
