"""A policy learns to use a tool over several turns: expressions that it cannot compute, and a calculator.

    python -m apps.tools.demonstrate runs/tools-demonstrations.jsonl
    python -m apps.sft.main --config apps/tools/warmup.yaml
    python -m apps.tools.main --config apps/tools/tiny.yaml

The training loops are those of `forge.recipes.rl`; `environment` in the configuration is where episodes come from.
"""

from typing import Any

from apps.toys import expressions
from forge.recipes.launch import launch
from forge.recipes.rl import train
from forge.recipes.rl_config import RLConfig
from forge.rewards.rules import ExactMatch
from forge_envs import Toolbox, ToolEnvironment, ToolError


def calc(expression: str) -> str:
    """The value of a sum, difference or product of two whole numbers."""
    try:
        if len(expressions.steps(expression)) != 1:
            raise ValueError("one calculation at a time")
        return str(expressions.evaluate(expression))
    except ValueError as error:
        raise ToolError(str(error)) from None


def environment() -> ToolEnvironment:
    return ToolEnvironment(Toolbox(calc, max_chars=40), ExactMatch())


class ToolsConfig(RLConfig):
    environment: Any = "apps.tools.main:environment"


if __name__ == "__main__":
    launch(train, ToolsConfig)
