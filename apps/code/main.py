"""A policy learns to program from whether its programs run and pass their tests, in a sandbox.

    python -m apps.code.demonstrate runs/code-demonstrations.jsonl
    python -m apps.sft.main --config apps/code/warmup.yaml
    python -m apps.code.main --config apps/code/tiny.yaml

The training loops are those of `apps.grpo`; what differs is where episodes come from.
"""

from apps.code.config import CodeConfig
from apps.code.environment import Programming
from apps.grpo import main as grpo
from forge.actors import Agent
from forge.observability import Run
from forge.recipe import launch
from forge.store import VersionStore
from forge.types import Sample


async def main(cfg: CodeConfig, model: str, held_out: list[Sample], record: Run, store: VersionStore) -> None:
    async with cfg.open() as sandbox:
        record.say(f"programs run at level {sandbox.level}")
        verifier = cfg.verifier(sandbox)
        dialogue = cfg.episode.dialogue(model)
        agent = Agent(lambda: Programming(verifier, cfg.attempts), dialogue, **cfg.limits())
        await grpo.main(cfg, model, held_out, record, store, agent=agent)


if __name__ == "__main__":
    launch(main, CodeConfig)
