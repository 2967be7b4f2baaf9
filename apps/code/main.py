"""A policy learns to program from whether its programs run and pass their tests, in a sandbox.

    python -m apps.code.demonstrate runs/code-demonstrations.jsonl
    python -m apps.sft.main --config apps/code/warmup.yaml
    python -m apps.code.main --config apps/code/tiny.yaml

The training loops are those of `forge.recipes.rl`; what differs is where episodes come from.
"""

from typing import Any

from apps.code.config import CodeConfig
from apps.code.environment import Programming
from forge.envs import GroupEnv
from forge.observability.console import log
from forge.recipes import rl
from forge.recipes.components import Job
from forge.recipes.launch import launch
from forge_envs import MultiTurnEnv


async def train(cfg: CodeConfig, job: Job) -> None:
    async with cfg.open() as sandbox:
        log.info("programs run at level %s", sandbox.level)
        verifier = cfg.verifier(sandbox)

        async def make_env(cfg: Any, job: Job) -> GroupEnv:
            dialogue = cfg.episode.dialogue(job.model)
            return MultiTurnEnv(lambda: Programming(verifier, cfg.attempts), dialogue, **cfg.limits())

        await rl.train(cfg, job, make_env)


if __name__ == "__main__":
    launch(train, CodeConfig)
