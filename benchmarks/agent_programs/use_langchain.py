"""A program on langchain: `use_langchain.py chat|responses|anthropic TASK`, with the vendors' variables."""

import os
import subprocess
import sys

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI


def bash(command: str) -> str:
    """Run a command in a shell."""
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    return result.stdout + result.stderr


name = os.environ["OPENAI_MODEL"]
if sys.argv[1] == "anthropic":
    model = ChatAnthropic(model_name=name)
else:
    model = ChatOpenAI(model=name, use_responses_api=sys.argv[1] == "responses")
agent = create_agent(model, [bash], system_prompt="Use the shell.")
print(agent.invoke({"messages": [{"role": "user", "content": sys.argv[2]}]})["messages"][-1].content)
