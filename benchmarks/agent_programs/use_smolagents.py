"""A program on smolagents: `use_smolagents.py TASK`, with OPENAI_BASE_URL and OPENAI_API_KEY."""

import os
import subprocess
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def bash(command: str) -> str:
    """Run a command in a shell.

    Args:
        command: what to run.
    """
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    return result.stdout + result.stderr


model = OpenAIModel(os.environ["OPENAI_MODEL"], os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
print(ToolCallingAgent(tools=[bash], model=model, max_steps=5).run(sys.argv[1]))
