"""A worker over the real protocol, whose environment does as its tasks say."""

import asyncio
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "src/forge_agents/workers"))
from protocol import SettingError, serve_collection


def mark(path):
    """Whether a file was there, which is there from now on."""
    was_there = os.path.exists(path)
    Path(path).touch()
    return was_there


class Odd:
    def rows(self):
        for number in range(5):
            yield ("eval" if number == 4 else "train"), {"question": f"question {number}", "answer": {"number": number}}

    async def play(self, task, url, model):
        print("what an environment prints is no message")
        act = task.get("act")
        if act == "die once" and not mark(task["mark"]):
            os.kill(os.getpid(), signal.SIGKILL)
        if act == "die":
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(3)
        if act == "wait":
            await asyncio.sleep(task.get("seconds", 600))
        if act == "hang":
            signal.pause()
        if act == "raise":
            raise ValueError("the rubric is broken")
        if act == "setting":
            raise SettingError("two runs, and one is needed")
        return {"reward": task.get("reward", 1.0), "stop": "ended", "metrics": {"pid": os.getpid(), "url": url}}

    async def close(self):
        mark(os.environ.get("CLOSED", os.devnull))


async def open_odd(environment, args):
    if environment != "odd":
        raise SettingError(f"environment {environment!r} is not installed")
    return Odd()


if __name__ == "__main__":
    serve_collection(open_odd)
