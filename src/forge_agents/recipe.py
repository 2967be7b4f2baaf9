"""Builds the environment that the section `episode.agent` of the RL recipe configures."""

import asyncio
import inspect
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from httpx import TransportError
from openai import APIConnectionError, APIError, AsyncOpenAI, DefaultAsyncHttpxClient, InternalServerError

from forge.actors import Generator, RewardActor
from forge.config import ConfigError, build
from forge.recipes.components import POLICY, Job
from forge.recipes.launch import summarise_error, user_frames
from forge.recipes.rl_config import RLConfig
from forge.runtime.controller import ForgeError
from forge.runtime.controller.handle import Handle
from forge.types import Sample
from forge_envs.environment import InfrastructureError

from .collection import WorkerPlay, check_collection
from .command import CommandRunner, program_path
from .config import AgentConfig, TestCommand
from .environment import AgentEnv, Outcome, Play, Score
from .gateway import GatewayActor, PolicySettings
from .models import place_part, seats
from .settings import Access
from .several import start_learners

TAIL = 1000  # characters of each output of a program that are kept with its episode
RETRIES = 5  # of a coroutine's requests: enough time for a generator that died to be restarted


def agent_config(values: Any) -> AgentConfig:
    """Return the section `episode.agent` as an object; ConfigError if it is invalid."""
    return build(AgentConfig, dict(values), "episode.agent")


async def agent_env(cfg: RLConfig, job: Job, policy: Handle) -> AgentEnv:
    """Start the gateway and the additional models, and return the environment whose episodes agents play.

    Args:
        policy: the service of generators of the run's own policy.
    """
    agent = agent_config(cfg.episode.agent)
    learners = await start_learners(cfg, job, cfg.load_algorithm())
    policies = {POLICY: policy, **{name: learner.policy for name, learner in learners.items()}}
    gateway = await GatewayActor.options(num_replicas=1).as_service(await policy_settings(cfg, job, policies))

    # `play` runs an agent; `player` is the object behind it that must be closed at the end of the run, if there is one.
    play: Play
    player: CommandRunner | WorkerPlay | None = None
    if agent.collection is not None:
        play = player = WorkerPlay(agent)
    elif agent.command is not None:
        player = CommandRunner(allow_unsafe=agent.allow_unsafe)
        play = await command_play(agent, player)
    else:
        play = function_play(agent)

    return AgentEnv(
        gateway,
        play,
        await reward_score(agent),
        limits={
            "max_turns": cfg.episode.max_turns,
            "max_tokens": cfg.episode.max_tokens,
            "max_turn_tokens": cfg.grpo.max_tokens,
            "seconds": agent.timeout,
        },
        retries=cfg.episode.retries,
        auxiliary=agent.auxiliary,
        concurrency=agent.concurrency,
        resources=None if player is None else asyncio.create_task(hold_player(player)),
        seats=seats(cfg.models),
        learners=learners,
    )


async def policy_settings(cfg: RLConfig, job: Job, policies: Mapping[str, Any]) -> dict[str, PolicySettings]:
    """Start the generators of frozen models, and return the settings of all models that the gateway serves.

    Args:
        policies: the services of generators of the trained models, by the models' names.

    Returns:
        The settings by the names under which agents ask for the models.
    """
    settings = {}
    for seat, policy in seats(cfg.models).items():
        model = job.model if policy == POLICY else cfg.models[policy].model or job.model
        settings[seat] = PolicySettings(
            policies[policy], model, cfg.episode, {"temperature": cfg.grpo.temperature}, cfg.generator.router_replay
        )

    for name, model_config in cfg.models.items():
        if model_config.is_frozen:
            model = model_config.model or job.model
            service = await Generator.options(**place_part(model_config, name, "generator")).as_service(
                model, **cfg.generator
            )
            episode = cfg.episode.model_copy(
                update={"template": model_config.template, "syntax": model_config.syntax, "chat_options": None}
            )
            settings[name] = PolicySettings(service, model, episode, {"temperature": model_config.temperature})

    return settings


def check_agent(values: Any) -> None:
    """Check the section `episode.agent` as far as that is possible before the run starts its processes.

    Raises:
        ConfigError: the section is invalid, its program is missing, or its collection or environment is missing or
            invalid.
    """
    agent = agent_config(values)
    if agent.collection is not None:
        check_collection(agent)
    elif agent.command is not None:
        check_program(agent)


def check_program(agent: AgentConfig) -> None:
    """Check that an agent's program, and the local files that its command names, will be available where it runs.

    Not checked are words with placeholders, and the program if `env` sets another PATH.

    Raises:
        ConfigError: the program or a file is not there; says where to put it.
    """
    command = agent.agent_command()
    name, *words = command.command
    in_task_folder = "the program works in its task folder: give it by `files` or `texts`, or by its whole path and "

    def is_given(word: str) -> bool:
        path = Path(os.path.normpath(word))
        return path in map(Path, agent.texts) or (agent.files is not None and (Path(agent.files) / path).exists())

    is_found = is_given(name) if "/" in name and name[0] != "/" else shutil.which(name, path=program_path(command))
    if not is_found and not ("/" not in name and "PATH" in agent.env):
        fix = agent.install or f"{in_task_folder}`readable`; one without a path must be in a `bin` of `readable`"
        raise ConfigError(f"episode.agent.command: {name} cannot be executed, because it is not installed: {fix}")

    # The first word after an interpreter is its program, wherever it is; any word may be a file of the current folder.
    is_interpreter = re.fullmatch(r"(python|pypy|node|deno|bun|ruby|perl|bash|dash|sh)[\d.]*", Path(name).name)
    for word in words:
        if word.startswith(("-", "/")) or "{" in word or is_given(word):
            continue
        if Path(word).is_file() or (is_interpreter and word is words[0]):
            raise ConfigError(
                f"episode.agent.command: {word!r} is not in `files`, and {in_task_folder}`readable` (for a file that "
                f"it writes: {{folder}}/{word})"
            )


async def hold_player(player: CommandRunner | WorkerPlay) -> None:
    """Wait until the run's event loop cancels this coroutine at its end, then close the given player of episodes."""
    try:
        await asyncio.Event().wait()
    finally:
        await player.close()


async def command_play(agent: AgentConfig, runner: CommandRunner) -> Play:
    """Start the runner, and return a function that plays one task: runs the agent's command and then its test, if any.

    Raises:
        InfrastructureError: commands cannot be confined on this machine.
    """
    await runner.start()
    command = agent.agent_command()

    async def play_command(access: Access, sample: Sample, evaluation: bool) -> Outcome:
        task = sample.prompt.text
        texts = {path: _fill_words(text, {"{task}": task}) for path, text in agent.texts.items()}
        result = await runner.run(command, url=access.url, key=access.key, model=POLICY, task_text=task, files=texts)

        try:
            info = {
                **{"exit_code": result.exit_code, "stdout": result.stdout[-TAIL:], "stderr": result.stderr[-TAIL:]},
                **({"reason": result.reason} if result.reason else {}),
            }
            if result.status == "missing":
                # An error, not a lost episode: the program would be missing in every episode.
                raise ConfigError(f"episode.agent.command: {result.reason}")
            if result.status == "failed":
                return Outcome(None, "infrastructure", True, info)

            stop = "crashed" if result.status == "exited" and result.exit_code else result.status
            if agent.test is None:
                return Outcome(None, stop, info=info)
            return await score_folder(agent.test, sample, result.folder, stop, info)
        finally:
            result.remove()

    async def score_folder(
        section: TestCommand, sample: Sample, folder: Path, stop: str, info: dict[str, Any]
    ) -> Outcome:
        """Run the test command in the agent's task folder, and return the outcome: reward 1.0 if it exits with 0."""
        values = {"{task}": sample.prompt.text, "{target}": sample.target}
        arguments = [_fill_words(argument, values) for argument in section.command]
        files = {path: _fill_words(text, values) for path, text in section.files.items()}
        test = replace(command, command=arguments, timeout=section.timeout, files=None)
        result = await runner.run(test, files=files, folder=folder)
        info = {**info, "test": (result.stdout + result.stderr)[-TAIL:]}

        if result.status in ("missing", "failed"):
            info["reason"] = result.reason
            # A test program in the task folder is missing if the agent has removed it: that is the agent's failure.
            is_in_folder = not os.path.isabs(arguments[0]) and "/" in arguments[0]
            if result.status == "missing" and is_in_folder:
                return Outcome(0.0, stop, info=info)
            return Outcome(None, "infrastructure", True, info)
        return Outcome(float(result.status == "exited" and result.exit_code == 0), stop, info=info)

    return play_command


def function_play(agent: AgentConfig) -> Play:
    """Return a function that plays one task by `episode.agent.function`.

    That coroutine function gets an OpenAI client of the session and the task, and returns the reward, or None.
    """
    function = agent.load_function()
    parameters = inspect.signature(function).parameters

    def fail(error: BaseException) -> Outcome:
        if agent.on_error == "raise":
            error.add_note("episode.agent.on_error: unscored lets the run continue")
            raise error
        text = "\n".join([*user_frames(error)[-1:], summarise_error(error)])
        return Outcome(0.0 if agent.on_error == "zero" else None, "crashed", info={"error": text})

    async def play_function(access: Access, sample: Sample, evaluation: bool) -> Outcome:
        options = {"evaluation": evaluation} if "evaluation" in parameters else {}
        # The gateway is on loopback with plain http: proxies are not used, and to load certificates would take 20 ms
        # for each client.
        client = AsyncOpenAI(
            base_url=f"{access.url}/v1",
            api_key=access.key,
            max_retries=RETRIES,
            http_client=DefaultAsyncHttpxClient(verify=False, trust_env=False),
        )

        try:
            async with client, asyncio.timeout(agent.timeout) as limit:
                reward = await function(client, sample, **options)
            if isinstance(reward, Mapping):
                return Outcome({str(seat): float(value) for seat, value in reward.items()}, "ended")
            return Outcome(None if reward is None else float(reward), "ended")
        except (ForgeError, InfrastructureError):
            raise
        except (APIConnectionError, InternalServerError, TransportError) as error:
            # TransportError: the openai package does not convert the error of a stream that breaks off.
            raise InfrastructureError(f"the gateway did not respond: {error}") from error
        except APIError as error:  # from an event of a stream, so without an HTTP status: only its code is known
            if error.code in ("overloaded", "server_error"):
                raise InfrastructureError(f"a response stream of the gateway failed: {error}") from error
            return fail(error)
        except (Exception, SystemExit) as error:  # SystemExit: a function must not end the run
            return Outcome(None, "timeout") if limit.expired() else fail(error)

    return play_function


async def reward_score(agent: AgentConfig) -> Score | None:
    """Return a function that scores an agent's last answer by `episode.agent.reward`; None if that is not set."""
    if agent.reward is None:
        return None
    reward = await RewardActor.as_local([agent.reward])

    async def score_answer(sample: Sample, answer: str, evaluation: bool) -> float | None:
        (result,) = await reward.score.route(sample.prompt, [answer], sample.target, evaluation)
        return result.reward  # type: ignore[no-any-return]

    return score_answer


def _fill_words(text: str, values: dict[str, str]) -> str:
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    return text
