"""A program on pydantic-ai: `use_pydantic_ai.py chat|responses|anthropic TASK`, with the vendors' variables."""

import os
import subprocess
import sys

from pydantic_ai import Agent

PREFIXES = {"chat": "openai-chat", "responses": "openai-responses", "anthropic": "anthropic"}
agent = Agent(f"{PREFIXES[sys.argv[1]]}:{os.environ['OPENAI_MODEL']}", system_prompt="Use the shell.")


@agent.tool_plain
def bash(command: str) -> str:
    """Run a command in a shell."""
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    return result.stdout + result.stderr


print(agent.run_sync(sys.argv[2]).output)
