"""Verifiers that are published as OpenEnv servers."""

from __future__ import annotations

from collections.abc import Sequence

from forge.rewards import Scores
from forge.rewards.verifier import collect
from forge_envs.environment import Action, InfrastructureError

from .client import OpenEnvClient
from .environment import OpenEnvEnvironment


class OpenEnvVerifier:
    """Scores responses by an OpenEnv server: each is the one action of an episode, whose reward is its score.

    The reset has the prompt as `question` and the target as `answer`. A server that is lost, rejects the response as an
    action, gives no reward or asks for another action leaves the response unscored, with the reason.

    Args:
        url: of the server.
        name: of the score in metrics.
        sessions: episodes at once.
        timeout: seconds for the answer to one message.
        patience: seconds to retry a server that is down or full.

    Raises:
        ValueError: an invalid setting.
    """

    def __init__(
        self, url: str, *, name: str = "openenv", sessions: int = 16, timeout: float = 60.0, patience: float = 30.0
    ) -> None:
        self.names = (name,)
        self._client = OpenEnvClient(url, sessions=sessions, timeout=timeout, patience=patience)

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """[responses, 1] scores of the responses to one prompt; NaN with a reason where one cannot be scored."""
        task = {"question": prompt} if target is None else {"question": prompt, "answer": target}
        return await collect([self._score(task, response) for response in responses], len(self.names))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _score(self, task: dict[str, str], response: str) -> float | None:
        environment = OpenEnvEnvironment(self._client)
        try:
            await environment.reset(task, seed=0)
            step = await environment.step(Action(response, response))
        finally:
            await environment.close()
        if not step.done:
            raise InfrastructureError(
                f"{self._client.url} did not end the episode: a verifier decides after one answer"
            )
        return step.reward
