"""The components of a recipe, placed and set up as its configuration says."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..actors import DatasetActor, Generator, ReferenceModel, ReplayBuffer, RewardActor, Trainer
from ..actors.publication import share_store
from ..algorithms import Algorithm, ValueLoss
from ..config.plugin import resolve
from ..data.special_tokens import spell_token
from ..envs.group import GroupEnv, SingleTurnEnv
from ..models.tokenizer import model_tokenizer, open_tokenizer
from ..observability.console import log
from ..runtime.controller import Service
from ..runtime.controller.handle import Handle
from ..runtime.store import Store
from ..training.settings import OptimizerSettings, PassSettings
from .checkpoint import RunState
from .evaluation import Evaluation, plan_evaluation
from .job import Job as Job

if TYPE_CHECKING:
    from .rl_config import RLConfig
    from .schema import RecipeConfig, TrainingRecipe


@dataclass
class RLComponents:
    """The components of the RL recipe. `reference` and `critic` are None where the algorithm needs none."""

    algorithm: Algorithm
    dataset: Handle
    buffer: Handle
    policy: Handle
    trainer: Handle
    reference: Handle | None
    critic: Handle | None
    env: GroupEnv
    state: RunState
    evaluation: Evaluation

    async def advance(self, version: int) -> None:
        """Admit the rollouts that may start with these weights."""
        # The data first learns what came of the ones before: a sampler draws by it.
        await self.state.tell()
        await self.buffer.advance.route(version)


POLICY = "policy"  # the name of the run's own weights, and the one by which agents ask for its model
AGENTS = "forge_agents.recipe"  # the extension of `episode.agent`
MakeEnv = Callable[["RLConfig", Job], Coroutine[Any, Any, GroupEnv]]


async def start_rl(cfg: RLConfig, job: Job, algorithm: Algorithm, make_env: MakeEnv | None = None) -> RLComponents:
    """Start all components of the RL recipe and restore the checkpoint it resumes from.

    Args:
        make_env: makes the environment from the configuration; None: the reward of the configuration, or its
            `environment`.
    """
    has_reference = cfg.starts_reference(algorithm)
    if algorithm.needs_reference and not has_reference:
        log.warning(
            "services.ref_model is not set: the KL is to the generator's weights, by the log-probabilities recorded "
            "at sampling; set services.ref_model to {} for a frozen reference"
        )

    if cfg.metrics.rollouts:
        token_texts = model_tokenizer(job.model)
        max_bytes = cfg.metrics.rollouts_mb * 1e6
        job.record.record(cfg.metrics.rollouts, max_bytes, lambda token: spell_token(token_texts, token)[0])
    single_turn = make_env is None and not cfg.multi_turn

    # All at once: each starts processes, loads a model or opens data, which takes seconds.
    reference = cfg.grpo.reference or job.model
    samples, buffer, (policy, policy_trainer), reward_service, reference_model, value_model = await asyncio.gather(
        start_dataset(cfg, job),
        start_buffer(cfg, job, algorithm),
        start_in_turn(
            cfg.colocated,
            lambda: start_rl_policy(cfg, job),
            lambda: start_rl_trainer(cfg, job, algorithm),
        ),
        start_if(single_turn, lambda: start_reward(cfg)),
        start_if(has_reference, lambda: start_reference(cfg, reference, cfg.grpo.temperature)),
        start_if(algorithm.needs_critic, lambda: start_critic(cfg, job.model, job)),
    )

    env: GroupEnv
    if single_turn:
        tokenizer = open_tokenizer(job.model) if cfg.reward.gives_steps else None
        env = SingleTurnEnv(reward_service, tokenizer, with_tokens=cfg.reward.reads_tokens)
    else:
        env = await make_env(cfg, job) if make_env is not None else await start_environment(cfg, job, policy)

    # Trainers besides the policy's: its critic, and additional policies' that an environment has started.
    further = {"critic": value_model} if value_model is not None else {}
    further |= getattr(env, "trainers", {})
    learning_reward = reward_service if cfg.reward.learns else None
    has_sampler = cfg.dataset.sampler is not None
    state = RunState(policy_trainer, samples, buffer, further, learning_reward, has_sampler)
    await state.resume(job.record)
    evaluation = plan_evaluation(cfg, job.held_out, job.sets, job.record, env)

    return RLComponents(
        algorithm, samples, buffer, policy, policy_trainer, reference_model, value_model, env, state, evaluation
    )


async def start_rl_policy(cfg: RLConfig, job: Job, name: str = POLICY, **placed: Any) -> Handle:
    """Start the generators of a policy, under the name of its weights. `placed`: see `start_generator`."""
    return await start_generator(
        cfg,
        job.model,
        store=job.store,
        weights_key=name,
        temperature=cfg.grpo.temperature,
        max_tokens=cfg.grpo.max_tokens,
        sampling=cfg.grpo.sampling(),
        **placed,
    )


async def start_rl_trainer(cfg: RLConfig, job: Job, algorithm: Algorithm, name: str = POLICY, **placed: Any) -> Handle:
    """Start the trainer of a policy, under the name of its weights. `placed`: see `start_trainer`."""
    return await start_trainer(
        cfg,
        job,
        algorithm,
        store=job.store,
        weights_key=name,
        temperature=cfg.grpo.temperature,
        max_policy_age=cfg.max_training_age,
        **placed,
    )


async def start_in_turn(
    colocated: bool, start_policy: Callable[[], Awaitable[Handle]], start_trainer: Callable[[], Awaitable[Handle]]
) -> tuple[Handle, Handle]:
    """Start policy and trainer together, or one after the other where they share a device.

    vLLM takes a share of the device's memory, which must be free, and fails if another process changes what is free
    while it measures. So it comes first, and has left the device when the trainer comes.
    """
    if not colocated:
        policy, trained = await asyncio.gather(start_policy(), start_trainer())
        return policy, trained
    policy = await start_policy()
    await policy.release.fanout()
    return policy, await start_trainer()


async def start_if(is_needed: bool, start: Callable[[], Awaitable[Handle]]) -> Any:
    """Start a component, or return None if the run does not need it."""
    return await start() if is_needed else None


async def start_environment(cfg: RLConfig, job: Job, policy: Handle) -> GroupEnv:
    """Make the environment that the configuration names, or its agent's."""
    if cfg.episode.agent is not None:
        return await resolve(f"{AGENTS}:agent_env", "episode.agent")(cfg, job, policy)
    return cfg.multi_turn_env(job.model)


async def start_dataset(cfg: TrainingRecipe, job: Job, *, in_turn: bool = False) -> Handle:
    """Start the stream of data: in this process, or where `services.dataset` places it.

    Args:
        in_turn: what it hands out has been trained on whenever a checkpoint is written, so that nothing is ever handed
            out again.
    """
    settings = {
        "kind": cfg.dataset.kind,
        "seed": cfg.seed,
        "remember": 0 if in_turn else cfg.checkpoint.remember,
        "checked": True,  # by launch
        **cfg.data(job.model),
    }
    if cfg.services.dataset is None:
        return await DatasetActor.as_local(job.model, **settings)
    return await DatasetActor.options(**cfg.placement("dataset")).as_actor(job.model, **settings)


async def start_buffer(cfg: RLConfig, job: Job, algorithm: Algorithm) -> Handle:
    """Start the replay buffer, with room for two batches of each version that may be in flight: in this process, or
    where `services.replay_buffer` places it."""
    batch_size = cfg.training.batch_size
    settings = {
        "capacity": 2 * batch_size * (cfg.max_policy_age + 1),
        "seed": cfg.seed,
        "replace": algorithm.dynamic_sampling * batch_size,
        "batch_size": batch_size,
        "steps": cfg.training.steps,
        "start": job.record.start,
        "max_policy_age": cfg.max_policy_age,
        "order": cfg.async_.order,
        "keep_outcomes": cfg.dataset.sampler is not None,
        # The schedule of a run has dropped groups as well; a loop that takes none must not fill the memory with them.
        "keep_dropped": sys.maxsize if cfg.metrics.rollouts == "all" else max(cfg.metrics.rollouts, 4 * batch_size),
    }
    if cfg.services.replay_buffer is None:
        return await ReplayBuffer.as_local(**settings)

    return await ReplayBuffer.options(**cfg.placement("replay_buffer")).as_actor(**settings)


async def start_generator(
    cfg: RecipeConfig,
    model: str,
    options: Mapping[str, Any] | None = None,
    store: Store | None = None,
    **settings: Any,
) -> Service:
    """Start generators of a model by the section `generator`, which end answers where the data's turns end.

    Args:
        options: of their placement; default: `services.generator`.
        store: has the weights of a run.
        settings: of `forge.actors.Generator`, such as those of sampling.
    """
    if store is not None:
        settings["store"] = await share_store(store)
    if cfg.dataset.chat_template or cfg.dataset.sources:  # a model's own eos is often not what ends a turn
        from ..data.prompts import stop_ids

        settings["stop_token_ids"] = stop_ids(cfg.dataset, model_tokenizer(model))  # type: ignore
    placement = cfg.placement("generator") if options is None else options
    return await Generator.options(**placement).as_service(model, **settings, **cfg.generator)


async def start_trainer(
    cfg: TrainingRecipe,
    job: Job,
    loss: Callable[..., Any],
    *,
    service: str = "trainer",
    options: Mapping[str, Any] | None = None,
    folder: str = "",
    **overrides: Any,
) -> Handle:
    """Start a trainer under `services.<service>`; other settings belong to `forge.actors.Trainer`.

    Args:
        options: of its placement; None: the service's.
        folder: of its checkpoints, below the run's: of a second trainer, such as a critic.
    """
    settings = {
        "optimizer": cfg.training.only(OptimizerSettings),
        "backend": cfg.trainer.backend,
        "parallelism": {**cfg.layout(service)},
        "colocated": cfg.shares_device(service),
        "recovery": f"{job.record.checkpoints}/{folder}".rstrip("/") if cfg.checkpoint.every else None,
        "lora": None if cfg.lora is None else {**cfg.lora},
        **cfg.training.only(PassSettings),
    }
    if "store" in overrides:
        overrides |= {
            "store": await share_store(overrides["store"]),
            "publish_dtype": None if cfg.engine is None else cfg.engine.dtype,
        }

    placement = {**(cfg.placement(service) if options is None else options)}
    if placement["with_gpus"] and not settings["colocated"]:
        # Every pack has another length: segments that grow leave no gaps. vLLM's sleep does not work with them.
        placement["env"] = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **placement["env"]}
    return await Trainer.options(**placement).as_actor(job.model, loss=loss, **(settings | overrides))


async def start_critic(cfg: RLConfig, start: str, job: Job, folder: str = "critic", **placed: Any) -> Handle:
    """Start a trainer of values alongside the policy's, from `critic.model` or the policy's own start."""
    return await start_trainer(
        cfg,
        job._replace(model=cfg.critic.model or start),
        ValueLoss(cfg.critic.clip),
        service="critic",
        folder=folder,
        report="critic",
        head="value",
        backend="fsdp",
        optimizer=cfg.training.only(OptimizerSettings) | {"learning_rate": cfg.critic.learning_rate},
        **placed,
    )


async def start_reward(cfg: RecipeConfig) -> Handle:
    """Start the reward functions: where `services.reward` places them, or in this process."""
    if cfg.services.reward is None:
        return await RewardActor.as_local(**cfg.reward.settings())
    return await RewardActor.options(**cfg.placement("reward")).as_service(**cfg.reward.settings())


async def start_reference(
    cfg: TrainingRecipe, model: str, temperature: float = 1.0, options: Mapping[str, Any] | None = None
) -> Handle:
    """Start a frozen model that scores batches."""
    passes = {name: cfg.training[name] for name in ("seq_len", "dtype", "weights_dtype")}
    sharded = cfg.placement("trainer")["procs"] > 1 or cfg.trainer.backend == "titan"
    placement = cfg.placement("ref_model") if options is None else options
    return await ReferenceModel.options(**placement).as_service(
        model, temperature=temperature, parallelism={**cfg.layout("ref_model")}, sharded=sharded, **passes
    )
