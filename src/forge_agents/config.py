"""The section `episode.agent` of a recipe."""

import shutil
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from forge.config.plugin import resolve
from forge.config.sections import ConfigError, Section

from .agent import AgentCommand


class TestCommand(Section):
    """A command that scores what the agent left in its folder: reward 1 if it exits with 0, else 0."""

    __test__ = False  # not a test of pytest's

    command: list[str]
    """The program and its arguments; `{task}` and `{target}` are replaced."""
    files: dict[str, str] = Field(default_factory=dict)
    """Texts that are written into the folder before it runs, by path, with the same replacements."""
    timeout: PositiveFloat = 60.0
    """Seconds."""


class CollectionConfig(Section):
    """An environment of a collection, which plays and scores the episodes."""

    kind: Literal["verifiers"]
    """`verifiers` 0.4, in a Python environment of its package."""
    environment: str
    """The id of a taskset."""
    python: str
    """The Python that has the package: `ENVIRONMENT/bin/python`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the environment, in the package's words."""
    scoring_timeout: PositiveFloat = 120.0
    """Seconds that an episode may take beyond `episode.agent.timeout`, for its scores."""

    def _check(self) -> None:
        # Without a slash, the program is looked for in PATH.
        if shutil.which(self.python) is None:
            raise ConfigError(
                f"episode.agent.collection.python {self.python} is not an executable: create the environment "
                "(docs/agent_gateway.md), and set its bin/python"
            )


class AgentConfig(Section):
    """An agent that plays the episodes: a program, a coroutine of Python, or an environment of a collection."""

    command: list[str] | None = None
    """The program and its arguments; `{task}`, `{url}`, `{key}`, `{model}` and `{folder}` are replaced."""
    function: Any = None
    """Instead of `command`: `package.module:name` of `async f(client, sample) -> float | None`, where the client is an
    `openai.AsyncOpenAI` whose model is "policy", and the task `sample.prompt.text`; it returns the reward."""
    collection: CollectionConfig | None = None
    """An environment that others made, which plays and scores."""
    on_error: Literal["unscored", "zero", "raise"] = "unscored"
    """What an exception of `function` makes of its episode: no score, reward 0, or the end of the run."""
    env: dict[str, str] = Field(default_factory=dict)
    """Additional variables; those of the gateway are set."""
    files: str | None = None
    """A folder that is copied into the task folder."""
    texts: dict[str, str] = Field(default_factory=dict)
    """Texts that are written into the task folder before the program starts, by path; `{task}` is replaced."""
    install: str | None = None
    """How to install the program, for the error that says that it is missing."""
    readable: list[str] = Field(default_factory=list)
    """What the program may read alongside the system and this Python."""
    timeout: PositiveFloat = 600.0
    """Seconds of an episode."""
    memory_mb: PositiveInt = 4096
    """Of all its processes."""
    processes: PositiveInt = 256
    """At once, threads included."""
    network: Literal["gateway", "host"] = "gateway"
    """What it reaches."""
    allow_unsafe: bool = False
    """Run the program with all rights of this user where it cannot be confined."""
    test: TestCommand | None = None
    """Scores the folder."""
    reward: Any = None
    """Instead of `test`: a reward function or verifier, of the agent's last answer."""
    auxiliary: Literal["drop", "train"] = "drop"
    """Calls alongside the task, such as for titles and summaries."""
    concurrency: PositiveInt = 64
    """Agents at once."""

    def _check(self) -> None:
        players = [name for name in ("command", "function", "collection") if getattr(self, name) is not None]
        if len(players) != 1:
            raise ConfigError(
                f"episode.agent needs one of command, function and collection, got {', '.join(players) or 'none'}"
            )
        if self.command is not None:
            self.agent_command()
            if (self.test is None) == (self.reward is None):
                raise ConfigError("episode.agent.command needs either a test or a reward")
        elif self.test is not None:
            raise ConfigError(
                "episode.agent.test needs episode.agent.command, because a function returns its reward: omit it"
            )
        if self.function is not None:
            self.load_function()

    def agent_command(self) -> AgentCommand:
        """Return the program with its settings; ConfigError if a limit is invalid, or a folder does not exist."""
        try:
            return AgentCommand(
                self.command or [],
                env=self.env,
                files=self.files,
                timeout=self.timeout,
                memory_mb=self.memory_mb,
                processes=self.processes,
                readable=self.readable,
                network=self.network,
            )
        except ValueError as error:
            raise ConfigError(f"episode.agent: {error}") from None

    def load_function(self) -> Any:
        """Return the coroutine function that `function` is or names; ConfigError if there is no such function."""
        named = isinstance(self.function, str)
        function = resolve(self.function, "episode.agent.function") if named else self.function
        if not callable(function):
            raise ConfigError(f"episode.agent.function {self.function!r} is not callable")
        return function
