"""Tasks of reasoning-gym as environments of one turn: a question, an answer, a score."""

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

# Families of tasks whose scorers were found to reward wrong answers, each with the reason for the error.
UNRELIABLE = {
    "complex_arithmetic": 'the answer "nan" scores 1',
    "game_of_life_halting": "unreadable answers score 1",
    "coin_flip": 'the answer "0" scores near 1',
}
# The words "nan", "inf" and "infinity", possibly with Python's "j" of an imaginary number. Scorers that compare numbers
# by a tolerance accept them for any number.
_NOT_FINITE = re.compile(r"(?<![a-z])(nan|inf|infinity)(?=j?(?![a-z]))", re.IGNORECASE)
_NONSENSE = "?!~ no answer ~!?"  # an answer that is right for no question
_SCORE_LIMIT = 10.0  # seconds for one score
# Characters that an answer may have beyond ten times those of the right one: the time of some scorers is not linear.
_MAX_SURPLUS = 10_000

Entry = Mapping[str, Any]  # an entry of a dataset: "question", "answer", and "metadata" of its family


class ReasoningGymEnvironment(Environment):
    """An environment that asks one question of a reasoning-gym dataset, and scores the answer.

    The task of an episode is the index of a question; None: the seed chooses one.

    The family's scorer gives the reward, with these exceptions:
    - "nan" and "inf" score 0 unless they are right, and so do answers that are far longer than the right one;
    - an answer for which the scorer raises an error scores 0, if the scorer accepts the right answer;
    - if it does not, or accepts nonsense, returns a score outside 0 to 1 or takes more than 10 s, the episode has no
      reward, and `info["unscored"]` has the reason;
    - a turn that was cut at its limit of tokens is not an answer: the episode is truncated, with reward 0.

    Args:
        family: the family of tasks, such as "gcd".
        size: the number of questions.
        seed: the seed of the dataset.
        prompt: formats a dataset entry; by default its "question". Small models do better with the payload only.
        answer: extracts the answer from a turn without its thoughts; by default it is all of the text.
        allow_wrong: allow a family that is known to reward wrong answers.
        settings: the family's settings.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: the family is unknown or rewards wrong answers, or its settings are invalid.
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

        # With a scorer that rewards wrong answers, the policy would learn to give them.
        fault = UNRELIABLE.get(family)
        if family == "basic_arithmetic" and "/" in dataset.config.operators:
            fault = 'some labels of divisions are wrong; take operators=["+", "-", "*"]'
        if fault is not None and not allow_wrong:
            raise ValueError(f"{family} is off: {fault}. Set allow_wrong=True to use it anyway")
        self._family = family
        self._dataset = dataset
        self._prompt = prompt

        self._answer = answer
        self._entry: Entry | None = None

    def __len__(self) -> int:
        """Return the number of questions."""
        return len(self._dataset)

    async def reset(self, task: int | None, *, seed: int) -> Step:
        """Ask a question."""
        self._entry = self._dataset[seed % len(self) if task is None else task]
        return Step((user_message(self._prompt(self._entry)),), info={"entry": self._entry})

    async def step(self, action: Action) -> Step:
        """Score the answer, which ends the episode."""
        entry = self._entry
        assert entry is not None, "step before reset"
        if action.truncated:
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
        # Return the score of an answer; Unscored if the scorer cannot be trusted with this question.
        expected = entry.get("answer")
        is_too_long = len(answer) > 10 * len(str(expected)) + _MAX_SURPLUS
        is_not_finite = _NOT_FINITE.search(answer) and not _NOT_FINITE.search(str(expected))
        if is_too_long or is_not_finite:
            return 0.0

        try:
            score = float(self._dataset.score_answer(answer, entry))
        except Exception as error:
            if expected is None or not self._accepts_answer(expected, entry):
                raise Unscored(f"the scorer of {self._family} raised {type(error).__name__}: {error}") from error
            return 0.0

        if not math.isfinite(score) or not 0 <= score <= 1:
            raise Unscored(f"the scorer of {self._family} gave {score}")

        # The score of a scorer that accepts nonsense means nothing.
        if answer != expected and score > 0.5 and self._accepts_answer(_NONSENSE, entry):
            raise Unscored(f"the scorer of {self._family} gives nonsense more than half a point on this question")
        return score

    def _accepts_answer(self, answer: object, entry: Entry) -> bool:
        """Return whether the scorer gives an answer more than half a point, without an error."""
        try:
            return float(self._dataset.score_answer(answer, entry)) > 0.5
        except Exception:
            return False
