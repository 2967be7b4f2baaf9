"""The worker for environments of the package verifiers, version 0.4, whose harness and rewards are used unchanged."""

import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from protocol import EpisodeError, SettingError, Values, serve_collection

# Modules in this folder must not hide installed packages of the same name.
sys.path.pop(0)

try:
    from verifiers.v1.clients import EvalClientConfig, ModelContext
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.types import SamplingConfig
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config
    from verifiers.v1.utils.prime import load_prime_config
except ImportError as error:
    PROBLEM = f"verifiers 0.4 cannot be imported ({error}): {sys.executable} -m pip install 'verifiers==0.4.*'"
else:
    PROBLEM = ""


async def open_environment(environment: str, args: Values) -> "Environment":
    """Load, check and start an environment.

    Args:
        environment: the id of its taskset.
        args: fields of its `EnvConfig`, as on the command line of verifiers after `--env.`.

    Raises:
        SettingError: verifiers or the environment cannot be imported, or a setting is invalid.
    """
    if PROBLEM:
        raise SettingError(PROBLEM)
    try:
        config = resolve_env_config({**args, "taskset": {**args.get("taskset", {}), "id": environment}})
        opened = Environment(load_environment(config))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        # In one line: pydantic's messages have several.
        raise SettingError(f"environment {environment!r}: {' '.join(str(error).split())}") from error
    opened.check()
    await opened.start()
    return opened


class Environment:
    """A loaded environment, with the servers that its episodes share."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.shared = AsyncExitStack()
        self.task_type = type(env.taskset).task_type()
        # The names of the agents that the policy plays. An agent with its own client is another model, such as a judge.
        self.players = [name for name, agent in agent_config_fields(env.config).items() if agent.client is None]

    def check(self) -> None:
        """Raise SettingError if episodes of this environment could not be played or scored."""
        agents = agent_config_fields(self.env.config)
        if len(self.players) != 1:
            raise SettingError(
                f"exactly one agent must be played by the policy, got {', '.join(self.players) or 'none'}: give every "
                "other agent a model with args.AGENT.client and args.AGENT.model"
            )

        for name, agent in agents.items():
            if agent.runtime.type == "prime" and not load_prime_config().get("api_key"):
                raise SettingError(
                    f"args.{name}.runtime is prime, which needs an account: set {{type: docker}}, or {{type: "
                    "subprocess}, which gives the harness all rights of your user"
                )
            # A retry by verifiers would be in the same session of the gateway: the failed attempt's turns would be
            # trained with the reward of the other one.
            if agent.retries.max_retries or agent.retries.rules or self.env.config.retries.max_retries:
                raise SettingError(
                    "args.retries and args.AGENT.retries must be 0: set episode.retries, which repeats whole episodes"
                )

    async def start(self) -> None:
        """Start the servers that episodes share: those of tools, and the one between harness and model."""
        await self.shared.enter_async_context(self.env.serving())

    async def close(self) -> None:
        """End the shared servers."""
        await self.shared.aclose()

    def rows(self) -> Iterator[tuple[str, Values]]:
        """Yield the tasks of the taskset, all in the split "train", as ("train", {"question", "answer"})."""
        for task in self.env.taskset:
            data = task.data
            question = data.prompt_text.strip() or data.description or data.name or f"task {data.idx}"
            yield "train", {"question": question, "answer": data.model_dump(mode="json")}

    async def play(self, task: Values, url: str, model: str) -> Values:
        """Play one episode, and return {"reward", "stop", "metrics"} of the policy's run in it.

        Raises:
            EpisodeError: the environment failed, or gave no reward.
            SettingError: the policy has several runs in the episode, or none, so that there is not one reward.
        """
        data = self.task_type.data_type().model_validate(task)
        (slot,) = self.env.slots(self.task_type(data, self.env.config.taskset.task))

        # The client reads its API key from an environment variable, which all episodes of this process share. So the
        # session's key is in the address, and the variable is one that is not set.
        client = EvalClientConfig(base_url=f"{url}/v1", api_key_var="FORGE_NO_KEY")
        episode = await self.env.run_slot(slot, ModelContext(client=client, model=model, sampling=SamplingConfig()))
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise EpisodeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "it did not end")

        # A trace is one agent's run. `check` has made sure that the policy plays exactly one agent; a trace without a
        # name is counted as this agent's.
        (player,) = self.players
        traces = [trace for trace in episode.traces if trace.agent.name in (player, "")]
        if len(traces) != 1:
            raise SettingError(
                f"an episode has {len(traces)} runs of {player}, but exactly one is needed for its reward"
            )
        (trace,) = traces
        rewards = {name: None if reward is None else reward.value for name, reward in trace.rewards.items()}
        if not rewards or None in rewards.values():
            raise EpisodeError(f"the environment gave no reward: {rewards}")

        return {
            "reward": trace.reward,
            "stop": trace.stop_condition or "ended",
            "metrics": {**trace.metrics, **rewards},
        }


if __name__ == "__main__":
    serve_collection(open_environment)
