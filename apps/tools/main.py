"""A policy learns to use a tool over several turns: expressions that it cannot reckon, and a calculator.

    python -m apps.tools.demonstrate runs/tools-demonstrations.jsonl
    python -m apps.sft.main --config apps/tools/warmup.yaml
    python -m apps.tools.main --config apps/tools/tiny.yaml

The training loops are those of `apps.grpo`; what differs is where episodes come from.
"""

from apps.grpo import main as grpo
from apps.grpo.agents import AgentConfig
from apps.toys import expressions
from forge.actors import Agent
from forge.data.rewards import ExactMatch
from forge.envs import Toolbox, ToolEnvironment, ToolError
from forge.observability import Run
from forge.recipe import launch
from forge.store import VersionStore
from forge.types import Sample


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


async def main(cfg: AgentConfig, model: str, held_out: list[Sample], record: Run, store: VersionStore) -> None:
    agent = Agent(environment, cfg.episode.dialogue(model), **cfg.limits())
    await grpo.main(cfg, model, held_out, record, store, agent=agent)


if __name__ == "__main__":
    launch(main, AgentConfig)
