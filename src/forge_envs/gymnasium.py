"""Gymnasium environments with text actions and observations."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from forge.rewards.verifier import Unscored
from forge_envs.environment import CUT, Action, Environment, InfrastructureError, Step, user_message
from forge_verifiers.threads import in_own_thread

try:
    from gymnasium import Env, spaces
except ImportError as error:
    raise ImportError("Gymnasium environments need gymnasium: pip install gymnasium") from error

Observation = Any  # a value of the environment's observation space
TextEnv: TypeAlias = "Env[Observation, Any]"


class GymnasiumEnvironment(Environment):
    """A Gymnasium environment whose actions are the texts of the policy's turns.

    The text after the thoughts is an action of a `Text` space, or the number or the name of an action of a `Discrete`
    space. If it is neither, or the turn was cut at its limit of tokens, the environment takes no step, and the policy
    gets an error. A task that is a mapping becomes the `options` of the environment's reset.

    Args:
        make: makes the environment on first use, such as `lambda: gymnasium.make("FrozenLake-v1")`.
        prompt: a text before the first observation.
        actions: the names of the actions of a `Discrete` space.
        to_text: formats observations.
        timeout: seconds for one call, after which InfrastructureError is raised. After a timeout or a cancelled call
            the next reset makes a new environment.

    Raises:
        ImportError: gymnasium is not installed.
        ValueError: at the first reset: the action space is neither `Discrete` nor `Text`.
    """

    def __init__(
        self,
        make: Callable[[], TextEnv],
        *,
        prompt: str = "",
        actions: Sequence[str] = (),
        to_text: Callable[[Observation], str] = str,
        timeout: float = 60.0,
    ) -> None:
        self._make = make
        self._prompt = prompt
        self._to_text = to_text
        self._timeout = timeout
        self._names = [name.casefold() for name in actions]
        self._env: TextEnv | None = None

    async def reset(self, task: Any, *, seed: int) -> Step:
        """Start an episode; the first one makes the environment."""
        if self._env is None:
            env = await self._call_environment(self._make, "make")
            if not isinstance(env.action_space, spaces.Discrete | spaces.Text):
                raise ValueError(f"the action space must be Discrete or Text, not {env.action_space}")
            self._env = env
        env = self._env
        options = dict(task) if isinstance(task, Mapping) else None
        observation, info = await self._call_environment(lambda: env.reset(seed=seed, options=options), "reset")
        text = self._to_text(observation)
        return Step((user_message(f"{self._prompt}\n{text}" if self._prompt else text),), info={"info": info})

    async def step(self, action: Action) -> Step:
        """Take the action that a turn of the policy names, or answer with the error in it."""
        env = self._env
        assert env is not None, "step before reset"
        if action.truncated:
            return Step((user_message(CUT),))

        try:
            parsed_action = self._parse_action(env.action_space, action.answer)
        except ValueError as error:
            return Step((user_message(f"error: {error}"),))

        observation, reward, terminated, truncated, info = await self._call_environment(
            lambda: env.step(parsed_action), "step"
        )
        return Step(
            (user_message(self._to_text(observation)),),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated) and not terminated,
            info={"info": info},
        )

    async def close(self) -> None:
        """Close the environment; the next reset makes a new one."""
        env, self._env = self._env, None
        if env is not None:
            await self._call_environment(env.close, "close")

    def _parse_action(self, space: Any, text: str) -> str | int:
        """Return the action that a text names; ValueError, which describes the valid ones, if it names none."""
        if isinstance(space, spaces.Text):
            if not space.contains(text):
                raise ValueError(
                    f"an action is {space.min_length} to {space.max_length} characters of {space.characters}"
                )
            return text
        # A `Discrete` space need not start at 0.
        first, last = int(space.start), int(space.start + space.n - 1)
        if self._names:
            if text.casefold() in self._names:
                return first + self._names.index(text.casefold())
            raise ValueError(f"an action is one of {', '.join(self._names)}")
        if text.removeprefix("-").isdecimal() and first <= int(text) <= last:
            return int(text)
        raise ValueError(f"an action is a number from {first} to {last}")

    async def _call_environment(self, function: Callable[[], Any], call_name: str) -> Any:
        try:
            return await in_own_thread(function, limit=self._timeout, name=f"{call_name} of a Gymnasium environment")
        # In both cases the thread may still use the environment: the next reset makes a new one.
        except asyncio.CancelledError:
            self._env = None
            raise
        except Unscored as unscored:
            self._env = None
            raise InfrastructureError(str(unscored)) from None
