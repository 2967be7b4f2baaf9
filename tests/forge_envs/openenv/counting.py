"""A small environment that counts turns, and does what goes wrong elsewhere when it is told to."""

import asyncio
import os
import sys
from fractions import Fraction

from forge_envs import Action, Environment, InfrastructureError, Step

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


class Counting(Environment):
    """Counts the turns of an episode."""

    made = 0
    closed = 0

    def __init__(self):
        type(self).made += 1

    async def reset(self, task, *, seed):
        self.turns, self.seed = 0, seed
        return Step(
            ({"role": "user", "content": f"task {task}, seed {seed}"},), tools=(ADD,), info={"pid": os.getpid()}
        )

    async def step(self, action: Action):
        self.turns += 1
        said = {"role": "user", "content": f"turn {self.turns} of {self.seed}: {action.text}"}
        if action.calls:
            total = sum(action.calls[0].arguments.values())
            return Step(({"role": "tool", "name": "add", "content": str(total)},), reward=0.5)
        if action.text == "raise":
            raise KeyError("nothing here")
        if action.text == "lose":
            raise InfrastructureError("the sandbox has gone")
        if action.text == "hang":
            await asyncio.sleep(1.0)
        if action.text == "unscored":
            return Step((said,), reward=None, terminated=True)
        if action.text == "rewrite":
            return Step((said,), rewritten=True)
        if action.text == "cut":
            return Step((said,), reward=2.0, truncated=True, info={"why": "enough", "where": {1, 2}})
        if action.text == "odd reward":
            return Step((said,), reward=Fraction(1, 2))
        if action.text == "odd info":
            return Step((said,), info={("a", "b"): 1})
        if action.text == "odd message":
            return Step(({"role": "user", "content": {1}},))
        return Step((said,), reward=float(self.turns), terminated=action.text == "end")

    async def close(self):
        type(self).closed += 1


async def main(port):
    """Serve it until the process is ended."""
    from forge_envs.openenv import serve

    async with serve(Counting, port=port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
