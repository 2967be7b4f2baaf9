"""A program on openai-agents: `use_openai_agents.py responses|chat TASK`, with OPENAI_BASE_URL and OPENAI_API_KEY."""

import os
import subprocess
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api


@function_tool
def bash(command: str) -> str:
    """Run a command in a shell.

    Args:
        command: what to run.
    """
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    return result.stdout + result.stderr


set_default_openai_api("chat_completions" if sys.argv[1] == "chat" else "responses")
agent = Agent(name="Coder", instructions="Use the shell.", model=os.environ["OPENAI_MODEL"], tools=[bash])
print(Runner.run_sync(agent, sys.argv[2], max_turns=10).final_output)
