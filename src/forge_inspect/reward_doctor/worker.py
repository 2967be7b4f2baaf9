"""The process in which an examined reward runs: it may hang, crash or print, and its examiner stays.

Requests and answers are lines of JSON, on the descriptors that standard input and output are at the start.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

from forge.rewards.reward import Reward
from forge.rewards.rules import load_reward
from forge.types import Prompt


async def answer(reward: Reward, request: dict[str, Any]) -> dict[str, Any]:
    """The rewards of a group of responses, or the error that came instead, with the seconds that it took."""
    prompt = Prompt(request["prompt"], (), 0, request["row"])
    began = time.perf_counter()
    try:
        scores = await reward.score(prompt, request["responses"], request["target"])
    except Exception as error:  # whatever user code raises is what is looked for
        return {"error": f"{type(error).__name__}: {error}"[:300], "seconds": time.perf_counter() - began}
    return {"rewards": [score.reward for score in scores], "seconds": time.perf_counter() - began}


async def serve(name: str) -> None:
    """Answer requests until there are no more."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    # What the reward prints must not be taken for an answer.
    os.dup2(2, 1)
    reward = Reward([load_reward(name)], None)
    reward.setup()
    # Its start is not a part of the first call.
    answers.write(b"{}\n")
    answers.flush()
    while line := requests.readline():
        text = json.dumps(await answer(reward, json.loads(line)))
        answers.write(text.encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
