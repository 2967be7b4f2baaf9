"""An agent that was written for a provider's API learns from whether its answers are right.

python -m apps.tools.demonstrate runs/tools-demonstrations.jsonl
python -m apps.sft.main --config apps/tools/warmup.yaml
python -m apps.agent.main --config apps/agent/tiny.yaml
"""

from openai import AsyncOpenAI

from apps.agent.program import solve
from forge.recipes.launch import launch
from forge.recipes.rl import train
from forge.recipes.rl_config import RLConfig
from forge.types import Sample


async def play(client: AsyncOpenAI, sample: Sample) -> None:
    """Let the agent answer a task; `episode.agent.reward` scores the answer."""
    await solve(client, "policy", sample.prompt.text)


if __name__ == "__main__":
    launch(train, RLConfig)
