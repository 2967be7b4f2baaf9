"""An agent as people ship one: it asks a model for the value of an expression, reckons for it, and prints its answer.

OPENAI_BASE_URL=... OPENAI_API_KEY=... OPENAI_MODEL=... python program.py "37-55*51"
"""

import asyncio
import json
import operator
import os
import re
import sys

from openai import AsyncOpenAI
from openai.types.shared_params import FunctionDefinition

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
CALC: FunctionDefinition = {
    "name": "calc",
    "description": "The value of a sum, difference or product of two whole numbers.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}


def calc(expression: str) -> str:
    """The value of an operation on two numbers, or an error."""
    match = re.fullmatch(r"(-?\d{1,40})([-+*])(-?\d{1,40})", expression)
    if match is None:
        return "error: one calculation at a time"
    return str(OPERATORS[match[2]](int(match[1]), int(match[3])))


async def solve(client: AsyncOpenAI, model: str, question: str, turns: int = 4) -> str:
    """The model's answer to a question, after the calculations that it asks for."""
    messages: list = [{"role": "user", "content": question}]
    for _ in range(turns):
        reply = await client.chat.completions.create(
            model=model, messages=messages, tools=[{"type": "function", "function": CALC}]
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            assert call.type == "function"
            value = calc(str(json.loads(call.function.arguments).get("expression")))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": value})
    return ""


if __name__ == "__main__":
    print(asyncio.run(solve(AsyncOpenAI(), os.environ["OPENAI_MODEL"], sys.argv[1])))
