"""Supervised fine-tuning: cross-entropy on conversations, prompts with answers or plain text, of one or more datasets.

It ends after `training.steps`, or as soon as held-out accuracy reaches `eval.stop_at`.
"""

import asyncio

from pydantic import PositiveInt

from ..algorithms import SFTLoss
from ..data.config import SupervisedConfig
from ..data.packing import pack
from ..data.supervised import make_samples
from ..engines.settings import EngineSettings
from ..envs.group import SingleTurnEnv
from . import components, rules
from .eval_config import EvalConfig
from .job import Job, RunState
from .schema import RecipeConfig


class SFTEvalConfig(EvalConfig):
    """Held-out loss and, with `accuracy`, the share of right greedy answers: conversations are continued at the last
    turn of the assistant."""

    accuracy: bool = True
    """Generate answers, which the reward judges."""
    max_tokens: PositiveInt = 512
    """Most tokens of an answer."""


class SFTConfig(RecipeConfig):
    """Supervised fine-tuning."""

    dataset: SupervisedConfig
    eval: SFTEvalConfig = SFTEvalConfig()

    def _check(self) -> None:
        super()._check()
        self.check_services()
        self.dataset.limit("max_tokens", self.training.seq_len, "dataset.max_tokens must not exceed training.seq_len")
        rules.check_rules(rules.OFFLINE_RULES + rules.SFT_RULES, self)

    @property
    def engine(self) -> EngineSettings | None:
        """Return the settings of the engine that answers held-out problems; None if `eval.accuracy` is false."""
        return self.generator if self.eval.accuracy else None

    @property
    def generates(self) -> bool:
        """Return whether evaluations generate answers."""
        return self.eval.accuracy and self.eval.problems > 0


async def train(cfg: SFTConfig, job: Job) -> None:
    """Train `job.model` on the tokens of demonstrations that their mask selects, as a recipe of
    `forge.recipes.launch`."""
    record, held_out = job.record, job.held_out

    aggregation = cfg.training.aggregation or "token_mean"
    samples_answers = cfg.eval.accuracy and bool(held_out)
    dataset, (policy, trainer), reward = await asyncio.gather(
        components.start_dataset(cfg, job, in_turn=True),
        components.start_in_turn(
            cfg.colocated,
            lambda: components.start_if(
                samples_answers,
                lambda: components.start_generator(cfg, job.model, store=job.store, max_tokens=cfg.eval.max_tokens),
            ),
            lambda: components.start_trainer(cfg, job, SFTLoss(), store=job.store, aggregation=aggregation),
        ),
        components.start_if(samples_answers, lambda: components.start_reward(cfg)),
    )
    state = RunState(trainer, dataset)
    await state.resume(record)

    samples = make_samples(held_out, job.model)
    version = record.start  # of the trainer's weights

    async def evaluate_held_out() -> dict[str, float]:
        if not held_out:
            return {}

        batch = pack(held_out, aggregation=aggregation)
        metrics = {"eval/loss": -float((batch.weights * await trainer.logprobs.route(batch)).sum())}
        if policy is None:
            return metrics

        await trainer.push_weights.call(version)
        await policy.update_weights.fanout(version)
        env = SingleTurnEnv(reward, with_tokens=cfg.reward.reads_tokens)
        metrics |= await env.evaluate(policy, samples, record.keep_evaluation)
        if cfg.colocated:
            await policy.release.fanout()
        return metrics

    async def train_step(step: int) -> dict[str, float]:
        nonlocal version
        episodes = await dataset.supervised.route(cfg.training.batch_size)
        metrics: dict[str, float] = await trainer.train_step.route(episodes)
        version = step
        return metrics

    await job.run_steps(cfg, state, train_step, evaluate_held_out)
