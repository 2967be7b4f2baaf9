"""Evaluate any model by the section `eval` of a recipe's configuration, without a run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from forge.config.sections import ConfigError
from forge.envs.group import GroupEnv, SingleTurnEnv
from forge.models.find import check_family, resolve_model
from forge.observability.rollouts import held_out_lines
from forge.recipes.components import start_generator, start_reward
from forge.recipes.evaluation import load_sets, plan_evaluation
from forge.recipes.prepare import check_data
from forge.recipes.rl_config import RLConfig
from forge.runtime.controller import run


def evaluate_suite(cfg: RLConfig, answers: Path | None = None) -> dict[str, float]:
    """Evaluate `cfg.model` on all sets of `cfg.eval`, and return the metrics by name, as a run logs them.

    Args:
        answers: a file to which the answers are written in the format of a run's held_out.jsonl; None to discard them.

    Raises:
        ConfigError, ValueError, FileNotFoundError: the configuration, the model or the data is not usable; nothing was
            started.
    """
    if cfg.model is None:
        raise ConfigError("forge eval needs a model: give its directory or hub id")
    if cfg.episode.agent is not None or cfg.models:
        raise ConfigError(
            "forge eval does not support agents: start a run with training.steps 1 and training.learning_rate 0 instead"
        )
    if not cfg.eval.intervals():
        raise ConfigError("eval.problems is 0 and eval.sets is empty: there is nothing to evaluate")

    # The checks of a run, in the same order: models before data, which may take minutes to read.
    check_family(cfg.model)
    model = resolve_model(cfg.model)
    cfg.check_tokenizer(model)
    cfg.check_reward()
    data = cfg.data(model)
    _, first = check_data(data, cfg.eval, model, cfg.seed)
    sets = load_sets(data, cfg.eval, model, cfg.seed)

    lines: list[bytes] = []
    keeper: Any = SimpleNamespace(
        keep_evaluation=lambda samples, episodes, name="": lines.append(held_out_lines(0, samples, episodes, name))
    )

    async def evaluate_sets() -> dict[str, float]:
        # As in a run, the settings of rollouts are the defaults of an evaluation.
        rollouts = cfg.grpo
        policy = await start_generator(
            cfg,
            model,
            temperature=rollouts.temperature,
            max_tokens=rollouts.max_tokens,
            sampling=rollouts.sampling(),
        )
        if cfg.multi_turn:
            env: GroupEnv = cfg.multi_turn_env(model)
        else:
            env = SingleTurnEnv(await start_reward(cfg), with_tokens=cfg.reward.reads_tokens)

        return await plan_evaluation(cfg, first, sets, keeper, env).run(policy, 0)

    metrics: dict[str, float] = run(evaluate_sets())
    if answers is not None:
        answers.write_bytes(b"".join(lines))
    return metrics
