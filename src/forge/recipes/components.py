"""The components of a recipe, placed and set up as its configuration says."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, cast

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
from .evaluation import Evaluation, plan_evaluation
from .job import Job as Job, RunState
from .rl_config import RLConfig
from .schema import RecipeConfig, TrainingRecipe


@dataclass
class RLComponents:
    """The started components of the RL recipe. `reference` and `critic` are None where the algorithm needs none."""

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
        """Admit the rollouts that may start once generators have the weights of this version."""
        # First the outcomes so far go to the data, whose sampler draws the next rows by them.
        await self.state.report_outcomes()
        await self.buffer.advance.route(version)


POLICY = "policy"  # the name of the run's own weights, and the one by which agents ask for its model
AGENTS = "forge_agents.recipe"  # the extension of `episode.agent`
MakeEnv = Callable[[RLConfig, Job], Coroutine[Any, Any, GroupEnv]]


async def start_rl(cfg: RLConfig, job: Job, algorithm: Algorithm, make_env: MakeEnv | None = None) -> RLComponents:
    """Start all components of the RL recipe, and restore the checkpoint that the run resumes from, if any.

    Args:
        algorithm: `cfg.load_algorithm()`.
        make_env: makes the environment from the configuration; None: it follows from the configuration, a single turn
            with its reward or the episodes of its `environment` or agent.
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

    # All at the same time: each starts processes, loads a model or opens data, which takes seconds.
    single_turn = make_env is None and not cfg.multi_turn
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

    if single_turn:
        tokenizer = open_tokenizer(job.model) if cfg.reward.gives_steps else None
        env: GroupEnv = SingleTurnEnv(reward_service, tokenizer, with_tokens=cfg.reward.reads_tokens)
    elif make_env is not None:
        env = await make_env(cfg, job)
    elif cfg.episode.agent is not None:
        env = await resolve(f"{AGENTS}:agent_env", "episode.agent")(cfg, job, policy)
    else:
        env = cfg.multi_turn_env(job.model)  # plays `environment`

    # The critic, and the trainers of additional policies, which an environment has started.
    other_trainers = ({} if value_model is None else {"critic": value_model}) | getattr(env, "trainers", {})
    learning_reward = reward_service if cfg.reward.learns else None
    has_sampler = cfg.dataset.sampler is not None
    state = RunState(policy_trainer, samples, buffer, other_trainers, learning_reward, has_sampler)
    await state.resume(job.record)

    evaluation = plan_evaluation(cfg, job.held_out, job.sets, job.record, env)
    return RLComponents(
        algorithm, samples, buffer, policy, policy_trainer, reference_model, value_model, env, state, evaluation
    )


async def start_rl_policy(cfg: RLConfig, job: Job, name: str = POLICY, **placed: Any) -> Handle:
    """Start the generators of a policy, which sample as the section `grpo` says.

    Args:
        name: of the policy's weights in the run's store.
        **placed: additional arguments of `start_generator`, such as `options`.
    """
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
    """Start the trainer of a policy, with the loss of the algorithm.

    Args:
        name: of the policy's weights in the run's store.
        **placed: additional arguments of `start_trainer`, such as `options` and `folder`.
    """
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
    colocated: bool, start_policy: Callable[[], Awaitable[Any]], start_trainer: Callable[[], Awaitable[Handle]]
) -> tuple[Any, Handle]:
    """Start policy (or None) and trainer, and return both: at once, or one after the other if they share a device.

    vLLM takes a share of the device's memory, which must be free, and fails if another process changes what is free
    while it measures. So it starts first, and releases the device before the trainer starts.
    """
    if not colocated:
        policy, trained = await asyncio.gather(start_policy(), start_trainer())
        return policy, trained
    policy = await start_policy()
    if policy is not None:
        await policy.release.fanout()
    return policy, await start_trainer()


async def start_if(is_needed: bool, start: Callable[[], Awaitable[Handle]]) -> Any:
    """Start a component, or return None if the run does not need it."""
    return await start() if is_needed else None


async def start_dataset(cfg: TrainingRecipe, job: Job, *, in_turn: bool = False) -> Handle:
    """Start the stream of training data: where `services.dataset` places it, or in this process if that is null.

    Args:
        in_turn: the recipe takes data only when it trains on it at once. Then no sample is in flight when a checkpoint
            is written, and the stream need not remember samples to return them again after a resume.
    """
    settings = {
        "kind": cfg.dataset.kind,
        "seed": cfg.seed,
        "remember": 0 if in_turn else cfg.checkpoint.remember,
        "checked": True,  # by `prepare_run`
        **cfg.data(job.model),
    }
    if cfg.services.dataset is None:
        return await DatasetActor.as_local(job.model, **settings)
    return await DatasetActor.options(**cfg.placement("dataset")).as_actor(job.model, **settings)


async def start_buffer(cfg: RLConfig, job: Job, algorithm: Algorithm) -> Handle:
    """Start the replay buffer: where `services.replay_buffer` places it, or in this process if that is null.

    It holds at most two batches of each policy version that may be in flight.
    """
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
        # The run's schedule also lists dropped groups. The bound is for a loop that never takes them from the buffer.
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
    """Start generators of a model with the settings of the section `generator`.

    Their answers end at the model's own eos, and at the `stop_ids` of a prompt.

    Args:
        model: folder of the model.
        options: of their placement; None: the options of `services.generator`.
        store: holds the weights that the trainer publishes; None: the weights never change.
        **settings: arguments of `forge.actors.Generator`, such as `temperature`.
    """
    if store is not None:
        settings["store"] = await share_store(store)

    placement = cfg.placement("generator") if options is None else options
    engine = cfg.generator.model_copy(update={"exact": cfg.training.exact or cfg.generator.exact})
    return await Generator.options(**placement).as_service(model, **settings, **engine)


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
    """Start a trainer of `job.model`, as the configuration says.

    Args:
        loss: from named tensors to a loss, such as an algorithm.
        service: the key of `services` that describes it.
        options: of its placement; None: the service's.
        folder: of its checkpoints within the run's checkpoint folder; "" for the policy's trainer, whose checkpoints
            lie directly in it.
        **overrides: arguments of `forge.actors.Trainer` that differ from the configuration's.
    """
    settings = {
        "optimizer": cfg.training.only(OptimizerSettings),
        "backend": cfg.trainer.backend,
        "parallelism": {**cfg.layout(service)},
        "colocated": cfg.shares_device(service),
        "recovery": f"{job.record.checkpoints}/{folder}".rstrip("/") if cfg.checkpoint.every else None,
        "lora": None if cfg.lora is None else {**cfg.lora},
        "chat_template": exported_template(cfg, job.model),
        **cfg.training.only(PassSettings),
        **({"base_model": cfg.model or job.model} if cfg.trainer.backend == "tinker" else {}),
    }
    if "store" in overrides:
        overrides |= {
            "store": await share_store(overrides["store"]),
            "publish_dtype": None if cfg.engine is None else cfg.engine.dtype,
        }

    placement = {**(cfg.placement(service) if options is None else options)}
    if placement["with_gpus"] and not settings["colocated"]:
        # Every batch has another length, and fixed memory segments would leave gaps between them; these grow. With
        # `colocated` they are off, since vLLM's sleep does not work with them.
        placement["env"] = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **placement["env"]}
    return await Trainer.options(**placement).as_actor(job.model, loss=loss, **(settings | overrides))


def exported_template(cfg: Any, model: str) -> str | None:
    """Return the chat template that the exported model brings: the one of `episode`, if it makes the tokens, else of
    the data; None for the one of the tokenizer in the folder `model`."""
    if getattr(cfg, "multi_turn", False):
        return cast(str | None, cfg.episode.dialogue(model).exported_template)
    return cast(str | None, cfg.dataset.exported_template(model_tokenizer(model)))


async def start_critic(cfg: RLConfig, start: str, job: Job, folder: str = "critic", **placed: Any) -> Handle:
    """Start the critic: a trainer of a model with a value head, with the settings of the section `critic`.

    Args:
        start: the model that it starts from where `critic.model` is null.
        folder: of its checkpoints within the run's checkpoint folder.
        **placed: additional arguments of `start_trainer`, such as `options`.
    """
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
    """Start the service of reward functions: where `services.reward` places it, or in this process if that is null."""
    if cfg.services.reward is None:
        return await RewardActor.as_local(**cfg.reward.settings())
    return await RewardActor.options(**cfg.placement("reward")).as_service(**cfg.reward.settings())


async def start_reference(
    cfg: TrainingRecipe, model: str, temperature: float = 1.0, options: Mapping[str, Any] | None = None
) -> Handle:
    """Start a frozen model that computes log-probabilities of batches, as a reference or a teacher.

    Args:
        temperature: at which they are computed.
        options: of its placement; None: the options of `services.ref_model`.
    """
    passes = {name: cfg.training[name] for name in ("seq_len", "dtype", "weights_dtype")}
    is_sharded = cfg.placement("trainer")["procs"] > 1 or cfg.trainer.backend == "titan"
    placement = cfg.placement("ref_model") if options is None else options
    return await ReferenceModel.options(**placement).as_service(
        model, temperature=temperature, parallelism={**cfg.layout("ref_model")}, sharded=is_sharded, **passes
    )
