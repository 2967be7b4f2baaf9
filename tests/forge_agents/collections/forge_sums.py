"""An environment of verifiers 0.4: sums, asked in one turn or two, with a metric alongside the reward."""

import itertools
import os
import signal

import verifiers.v1 as vf
from openai import AsyncOpenAI

TURNS = itertools.count()


def die_once():
    """Kill this process at its sixth turn, unless one before it died so."""
    mark = os.environ["FORGE_SUMS_MARK"]
    if next(TURNS) == 5 and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        if os.environ.get("FORGE_SUMS") == "raise":
            raise ValueError("the rubric is broken")
        return 2.0 * (trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    number: int = 20


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for number in range(self.config.number):
            data = SumData(prompt=f"{number}+{number}", answer=str(2 * number), name=f"sum-{number}")
            yield SumTask(data, self.config.task)


class SumHarness(vf.Harness[vf.HarnessConfig]):
    """Asks, and asks once more; without a process, so that it needs neither uv nor an index."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(2):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                if os.environ.get("FORGE_SUMS") == "die":
                    die_once()
                messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
                messages.append({"role": "user", "content": "sure?"})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["SumHarness", "SumTaskset"]
