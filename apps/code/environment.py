"""A programming task, and that many attempts at it."""

from apps.toys import programs
from forge.types import Sample
from forge_envs import Action, Environment, InfrastructureError, Step
from forge_sandbox import CodeVerifier


class Programming(Environment):
    """The policy writes the lines of a function f(x). A program that fails a test is answered by the share that it
    passes; that of the last attempt is the reward."""

    def __init__(self, verifier: CodeVerifier, attempts: int = 1) -> None:
        self.verifier, self.attempts = verifier, attempts

    async def reset(self, task: Sample, *, seed: int) -> Step:
        self.task, self.left, self.earned = task, self.attempts, 0.0
        return Step(({"role": "user", "content": task.prompt.text},))

    async def step(self, action: Action) -> Step:
        self.left -= 1
        scores = await self.verifier.score(self.task.prompt.text, [programs.function(action.text)], self.task.target)
        share = float(scores.values[0, 0])
        if scores.reasons:
            raise InfrastructureError(scores.reasons[0, 0])
        reward, self.earned = share - self.earned, share
        if share == 1.0 or not self.left:
            return Step(reward=reward, terminated=True)
        return Step(({"role": "user", "content": f"{share:.0%} of the tests pass"},), reward)
