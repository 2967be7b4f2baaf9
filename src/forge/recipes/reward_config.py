"""The section `reward`: what scores the responses of a run."""

from functools import cached_property
from typing import Any

from ..config.plugin import load_plugin, resolve
from ..config.sections import ConfigError, Section
from ..data.config import DatasetConfig
from ..rewards.arguments import RewardCall, columns_of
from ..rewards.reward import as_verifier, call_of, check_parts
from ..rewards.rules import load_reward


class RewardConfig(Section):
    """Sum of all reward parts that are set."""

    functions: list[Any] | None = None
    """Names from `forge.rewards.rules` or `package.module:Name`, or verifiers with their settings, `{use:
    package.module:Name, ...}`; from Python also the objects themselves. null: `MathReward` unless `verifiers` is
    set."""
    verifiers: Any = None
    """Models, judges and rules, with their scores as they are ([rewards.md](rewards.md)); null: none."""
    weights: list[float] | None = None
    """What each of `functions` is multiplied by; null: 1."""
    names: list[str] | None = None
    """Of `functions` in metrics, `reward/NAME`; null: their own."""
    accuracy: Any = None
    """The function that decides which answers are right; null: the first function of `functions`."""

    def _check(self) -> None:
        if self.verifiers is not None:
            self.verifiers = resolve("forge_verifiers.config:read_section", "reward.verifiers")(self.verifiers)
        if self.functions == [] and self.verifiers is None:
            raise ValueError("reward.functions is empty: name at least one, or set reward.verifiers")

        for item in self.functions or ():
            if not isinstance(item, str | dict):
                call_of(as_verifier(item))
        check_parts(len(self.settings()["functions"]), self.weights, self.names)
        if sum(bool(getattr(plugin, "learns", False)) for plugin in self.plugins) > 1:
            raise ValueError("reward.functions: at most one function can be a reward that learns")

    def settings(self) -> dict[str, Any]:
        """Return the section as arguments of `forge.actors.RewardActor`, with the default of `functions` filled in."""
        functions = self.functions
        if functions is None:
            functions = ["MathReward"] if self.verifiers is None else []
        return {**self, "functions": functions}

    @cached_property
    def plugins(self) -> list[Any]:
        """Return those of `functions` that are written with settings, constructed but not opened. They are cached: each
        is constructed only once, as it may hold a seed, a file or a port."""
        numbered = enumerate(self.functions or ())
        return [load_plugin(item, f"reward.functions[{n}]") for n, item in numbered if isinstance(item, dict)]

    @cached_property
    def calls(self) -> list[RewardCall]:
        """Return how each function is called, `accuracy` last if it is set. ValueError: a function does not exist, or
        takes other arguments than a reward."""
        # Functions with settings were constructed by `plugins`, in the same order.
        plugins = iter(self.plugins)
        scorers = [next(plugins) if isinstance(item, dict) else item for item in self.settings()["functions"]]
        if self.accuracy is not None:
            scorers.append(self.accuracy)
        loaded = [load_reward(item) if isinstance(item, str) else item for item in scorers]
        return [call_of(as_verifier(item)) for item in loaded]

    @property
    def required_columns(self) -> list[str]:
        """Return the names of the columns that a function takes and without which it cannot be called."""
        return list(dict.fromkeys(name for call in self.calls for name in call.columns))

    @property
    def reads_tokens(self) -> bool:
        """Return whether a function takes more of a completion than its text."""
        return any(call.reads_tokens for call in self.calls)

    def with_columns(self, data: DatasetConfig) -> DatasetConfig:
        """Return a copy of the section `dataset` with the columns that the functions take; settings that it has for
        columns and target_required stay."""
        # Verifiers always take the target, functions only if a parameter names it.
        calls = self.calls
        needs_target = self.verifiers is not None or any(call.needs_target for call in calls)
        required = dict.fromkeys((*data.required_columns, *self.required_columns))
        return data.model_copy(
            update={
                "columns": columns_of(calls) if data.columns is None else data.columns,
                "required_columns": list(required),
                "target_required": needs_target if data.target_required is None else data.target_required,
            }
        )

    @property
    def decides(self) -> bool:
        """Return whether `accuracy` or a function decides which answers are right."""
        scorers = (item for item in self.settings()["functions"] if not isinstance(item, dict))
        return self.accuracy is not None or any(not hasattr(item, "names") for item in scorers)

    @property
    def learns(self) -> bool:
        """Return whether the reward learns, so that checkpoints have to keep its state."""
        return any(getattr(plugin, "learns", False) for plugin in self.plugins)

    @property
    def gives_steps(self) -> bool:
        """Return whether a function rewards the single steps of a response."""
        return any(getattr(item, "gives_steps", False) for item in (*self.plugins, *(self.functions or ())))

    @property
    def files(self) -> list[str]:
        """Return the paths of files whose content decides rewards."""
        return [str(file) for plugin in self.plugins for file in getattr(plugin, "files", ())]

    def open(self) -> None:
        """Load all functions and check the folders and files that the section names, without loading models.

        Raises:
            ValueError: a function, a folder or a file does not exist, or is invalid.
        """
        _ = self.calls
        if self.verifiers is not None:
            self.verifiers.check_sources("reward.verifiers")
        for plugin in self.plugins:
            if hasattr(plugin, "check"):
                try:
                    plugin.check()
                except (ValueError, OSError) as error:
                    raise ConfigError(f"reward.functions: {error}") from None
