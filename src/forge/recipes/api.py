"""The Python API: `forge.train(model, dataset=..., reward=...)` and similar functions run recipes of `forge.recipes`.

Rewards, environments and algorithms are names or Python objects, closures and lambdas included. A call checks
everything before it starts a process, runs to the end, and leaves its results in `runs/<name>/`. It also works in a
notebook, where an event loop is running already.
"""

import asyncio
import difflib
import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial, update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..config.plugin import explain_names, hint_nearest
from ..config.sections import ConfigError, Section, build, keys_of, section_in
from ..types import Sampling
from .hooks import Hooks, OnRollouts, OnStep
from .result import Result

if TYPE_CHECKING:
    from .launch import Recipe
    from .rl import Loop
    from .schema import TrainingRecipe

T = TypeVar("T")
# Single keys that are errors for RL, since they mean something else in TRL.
AMBIGUOUS = {
    "epochs": "epochs are passes over each batch here: say steps, or training={'epochs': ...}",
    "epsilon": "epsilon is Adam's here: TRL's epsilon is clip_low; Adam's is training={'epsilon': ...}",
}
# The sections whose keys `train` accepts without the section. Those about one matter, such as `episode` or `critic`,
# are given as a whole.
SHARED = ("training", "grpo", "dpo", "dataset", "generator", "async", "eval", "checkpoint", "run")


def train(
    model: str | None = None,
    *,
    dataset: Any = None,
    reward: Any = None,
    reward_weights: Sequence[float] | None = None,
    environment: Any = None,
    algorithm: Any = "grpo",
    eval_dataset: Any = None,
    name: str | None = None,
    resume: str | None = None,
    recipe: "type[Loop] | Recipe | None" = None,
    on_step: OnStep | None = None,
    on_rollouts: OnRollouts | None = None,
    **settings: Any,
) -> Result:
    """Train a model by reinforcement learning with a reward or in an environment, and return the run's results.

    Args:
        model: folder or hub id; None with `from_scratch={...}`.
        dataset: a path, a hub id, rows (a list of dicts, a `datasets.Dataset`), or the keys of the section `dataset`.
        reward: a function of what its parameters name, such as `f(response, target) -> float | None`
            (docs/rewards.md), a verifier, a name, or a list of these.
        reward_weights: what each of several rewards is multiplied by.
        environment: a callable or its name that makes an environment for each episode, instead of `reward`.
        algorithm: a name ("grpo", "dapo", ...), a mapping of the name and settings, an `Algorithm`, a loss function or
            `nn.Module` over named tensors.
        eval_dataset: held-out rows or a path of them; None: no evaluation, unless `eval={...}` says otherwise.
        name: of the run's folder below runs/; None makes one from the time.
        resume: "auto" resumes the run of this name if there is something to resume.
        recipe: a subclass of `forge.recipes.rl.Loop`, whose attribute `config` may be a subclass of `RLConfig`, or
            `async def recipe(cfg, job)`, instead of the library's loop.
        on_step: `f(step, metrics)`, called after each step; True ends the training. See `forge.recipes.hooks.Hooks`.
        on_rollouts: `f(step, groups)`, called before each step with the groups that it trains on.
        settings: sections of the configuration as dicts (`training={"steps": 50}`), or single keys where only one
            section has them (`steps=50`, `n_samples=4`, `learning_rate=1e-5`); docs/configuration.md lists all.

    Raises:
        ConfigError: a setting is unknown or out of range.
        BadInput: the model or the data do not allow the run.
        Exception: whatever the reward, the environment or a component raises; nothing of the run is left running.
    """
    from .rl_config import RLConfig

    values: dict[str, Any] = {"algorithm": algorithm}
    if isinstance(reward, Mapping):
        values["reward"] = reward
    elif reward is not None:
        is_single = isinstance(reward, str) or not isinstance(reward, Sequence)
        values["reward"] = {"functions": [reward] if is_single else [*reward]}
    if reward_weights is not None:
        values["reward"] = {**values.get("reward", {}), "weights": [float(weight) for weight in reward_weights]}
    if environment is not None:
        values["environment"] = environment

    hooks = Hooks(on_step, on_rollouts)

    # A loop may have its own configuration, such as one with several policies that train.
    config_type = getattr(recipe, "config", RLConfig)
    return _run_recipe(
        _recipe_of(recipe), config_type, "rl", values, hooks, model, dataset, eval_dataset, name, resume, settings
    )


def sft(
    model: str | None = None,
    *,
    dataset: Any = None,
    eval_dataset: Any = None,
    name: str | None = None,
    resume: str | None = None,
    on_step: OnStep | None = None,
    **settings: Any,
) -> Result:
    """Fine-tune a model on demonstrations, and return the run's results. Takes the arguments of `train`."""
    from . import sft as recipe

    values = {"eval": {"accuracy": False}}
    hooks = Hooks(on_step)
    return _run_recipe(
        recipe.train, recipe.SFTConfig, "sft", values, hooks, model, dataset, eval_dataset, name, resume, settings
    )


def dpo(
    model: str | None = None,
    *,
    dataset: Any = None,
    eval_dataset: Any = None,
    name: str | None = None,
    resume: str | None = None,
    on_step: OnStep | None = None,
    **settings: Any,
) -> Result:
    """Train a model by DPO on pairs of answers, and return the run's results. Takes the arguments of `train`."""
    from . import dpo as recipe

    return _run_recipe(
        recipe.train, recipe.DPOConfig, "dpo", {}, Hooks(on_step), model, dataset, eval_dataset, name, resume, settings
    )


def evaluate(
    model: str,
    *,
    dataset: Any,
    reward: Any,
    problems: int | None = None,
    generator: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> dict[str, float]:
    """Return the metrics of a model's greedy answers, such as `{"eval/accuracy": ..., "eval/reward": ...}`.

    Args:
        model: folder or hub id.
        dataset, reward: as of `train`.
        problems: how many items of the dataset are answered, from its start; None: all rows of a list or a local file,
            256 otherwise.
        generator: settings of `forge.engines.EngineSettings`.
        sampling: settings that differ from greedy decoding, such as `max_tokens`.
    """
    from ..data.config import DatasetConfig
    from ..data.load import load_data
    from ..models import check_family, open_tokenizer, resolve_model
    from .reward_config import RewardConfig

    check_sampling(sampling)
    check_family(model)
    functions = [reward] if isinstance(reward, str) or not isinstance(reward, Sequence) else [*reward]
    scoring = RewardConfig(functions=functions)
    section = scoring.with_columns(build(DatasetConfig, _dataset_section(dataset), "dataset"))
    folder = resolve_model(model)
    items: Any = load_data(open_tokenizer(folder), kind=section.kind, **{**section, "shuffle": False})
    samples = items.held_out(_count_rows(section.path, problems))

    async def evaluate_policy(policy: Any) -> dict[str, float]:
        from ..actors import RewardActor
        from ..envs.group import SingleTurnEnv

        env = SingleTurnEnv(await RewardActor.as_service(functions), with_tokens=scoring.reads_tokens)
        return await env.evaluate(policy, samples, **sampling)

    return _with_policy(folder, generator, evaluate_policy)


def generate(
    model: str,
    prompts: str | Sequence[str],
    *,
    chat: bool = False,
    generator: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> Any:
    """Return the completion of a prompt, or a list of them for several prompts, in their order.

    A completion is a `forge.types.Completion`, with text, token ids and log-probabilities; with `n` there is a list of
    n completions for each prompt.

    Args:
        model: folder or hub id.
        chat: render each prompt as a user message with the model's chat template.
        generator: settings of `forge.engines.EngineSettings`.
        sampling: fields of `forge.types.Sampling`, such as `n`, `max_tokens` and `temperature`.
    """
    from ..models import check_family, open_tokenizer, resolve_model

    check_sampling(sampling)
    check_family(model)
    folder = resolve_model(model)
    inputs: list[Any] = [prompts] if isinstance(prompts, str) else [*prompts]
    if chat:
        from ..data.chat import ChatFormat

        tokenizer: Any = open_tokenizer(folder)
        chat_format = ChatFormat(tokenizer)
        dialogues: Any = [[{"role": "user", "content": text}] for text in inputs]
        rendered = [chat_format.render(dialogue, add_generation_prompt=True) for dialogue in dialogues]
        # Prompts go as tokens, since the template has already written bos, which the generator would write again.
        inputs = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered]
        sampling.setdefault("stop_token_ids", chat_format.stop_ids)

    completions = _with_policy(
        folder,
        generator,
        lambda policy: asyncio.gather(*(policy.generate.route(prompt, **sampling) for prompt in inputs)),
    )
    return completions[0] if isinstance(prompts, str) else completions


def _run_recipe(
    recipe: Callable[..., Any],
    config_type: "type[TrainingRecipe]",
    kind: str,
    sections: dict[str, Any],
    hooks: Hooks,
    model: str | None,
    dataset: Any,
    eval_dataset: Any,
    name: str | None,
    resume: str | None,
    settings: dict[str, Any],
) -> Result:
    """Build the configuration of a recipe from the arguments of `train`, run it, and return its results.

    Args:
        kind: starts the name of a run for which the user gives none.
        sections: sections and keys of the configuration, which `settings` of the user override.
    """
    from .launch import run_recipe

    arguments = {"dataset": None if dataset is None else _dataset_section(dataset), "model": model}
    sections = {name: value for name, value in arguments.items() if value is not None} | sections
    sections["run"] = {"name": name or f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"}
    held_out = {"problems": 0}
    if eval_dataset is not None:
        if (path := _dataset_section(eval_dataset).get("path")) is None:
            raise ConfigError(f"eval_dataset must be rows or the path of a file with rows, got {eval_dataset!r:.80}")
        held_out = {"path": path, "problems": _count_rows(path, None, 256)}
    sections["eval"] = {**sections.get("eval", {}), **held_out}

    # Each setting goes into the section that has its key.
    faults: dict[str, str] = {}
    for key, value in settings.items():
        try:
            for section, placed in _place_setting(config_type, key, value, sections.get("algorithm")).items():
                sections[section] = {**sections.get(section, {}), **placed} if isinstance(placed, Mapping) else placed
        except ConfigError as error:
            faults[key] = str(error)

    if faults:  # all at once, names of other libraries with one guide
        own_faults = [fault for key, fault in faults.items() if key in AMBIGUOUS or not explain_names([key])]
        raise ConfigError("; ".join(filter(None, [*own_faults, explain_names([*faults], python=True)])))

    cfg = build(config_type, sections)
    return Result(_run_anywhere(partial(run_recipe, recipe, cfg, resume=resume, hooks=hooks)))


def _recipe_of(recipe: Any) -> Callable[..., Any]:
    """Return a recipe, `async def recipe(cfg, job)`, for the argument of `train`.

    Args:
        recipe: None for the library's, a subclass of `forge.recipes.rl.Loop`, or a recipe.

    Raises:
        ConfigError: it is none of these.
    """
    from . import rl

    if recipe is None:
        return rl.train
    if isinstance(recipe, type) and issubclass(recipe, rl.Loop):
        # `partial` has no __module__, by which the model's card names the recipe.
        return update_wrapper(partial(rl.train, loop=recipe), rl.train)
    if inspect.iscoroutinefunction(recipe):
        return cast(Callable[..., Any], recipe)
    raise ConfigError(
        f"recipe must be a subclass of forge.recipes.rl.Loop or `async def recipe(cfg, job)`, got {recipe!r:.80}"
    )


def _place_setting(config_type: type[Section], key: str, value: Any, algorithm: Any) -> dict[str, Any]:
    """Return {section: {key: value}} for a key that one section has, and {key: value} for a section or a key at the top
    of the configuration. `algorithm` is the setting, whose own settings are keys of the section `grpo`.

    Raises:
        ConfigError: no section has the key, or several do.
    """
    sections = keys_of(config_type)
    if key in sections:
        return {key: value}
    if key in AMBIGUOUS and "grpo" in sections:
        raise ConfigError(AMBIGUOUS[key])

    section_types = {name: section_in(field.annotation) for name, field in sections.items()}
    section_keys = {
        name: keys_of(section) for name, section in section_types.items() if section is not None and name in SHARED
    }
    owners = [name for name, keys in section_keys.items() if key in keys]
    all_keys = [*sections, *(name for keys in section_keys.values() for name in keys)]
    if not owners and "grpo" in sections:
        similar_keys = difflib.get_close_matches(key, all_keys, n=1, cutoff=0.8)
        from ..algorithms import setting_names

        # A key that the algorithm has, such as beta, is not a misspelling of a similar one, such as beta2.
        if key in setting_names(algorithm) or not (similar_keys or explain_names([key])):
            owners = ["grpo"]

    if len(owners) > 1:
        choices = " or ".join(f"{name}={{{key!r}: ...}}" for name in owners)
        raise ConfigError(f"{key!r} is a key of several sections: write {choices}")
    if not owners:
        raise ConfigError(f"unknown setting {key!r}{hint_nearest(key, all_keys)}")
    return {owners[0]: {key: value}}


def check_sampling(sampling: Mapping[str, Any]) -> None:
    """Check that all names are fields of `forge.types.Sampling`. ConfigError: one is not; suggests the most similar."""
    known = [field.name for field in fields(Sampling)]
    for name in sampling:
        if name not in known:
            explanation = explain_names([name], python=True)
            raise ConfigError(explanation or f"unknown setting {name!r}{hint_nearest(name, known)}")


def _dataset_section(dataset: Any) -> dict[str, Any]:
    """Return the section `dataset` for the argument of `train`: the section itself, a path, a task's name, or rows."""
    if isinstance(dataset, Mapping):
        return dict(dataset)
    if isinstance(dataset, str | Path):
        name = str(dataset)
        return {"task": name} if ":" in name and not Path(name).exists() else {"path": name}
    if isinstance(dataset, Iterable):
        return {"path": dataset}
    raise ConfigError(f"dataset must be a path, a hub id, rows or a mapping, got {dataset!r:.80}")


def _count_rows(rows: Any, problems: int | None, limit: int | None = None) -> int:
    """Return the number of rows to evaluate on: `problems` if it is given, else at most `limit`, which is by default
    256 for a path and no bound for rows."""
    from ..data.files import open_rows

    if problems is not None:
        return problems
    # A local file is counted. Its faults are ignored here, and reported when its rows are read.
    if isinstance(rows, str) and Path(rows).is_file():
        with suppress(ValueError, OSError, ImportError):
            return min(limit or 256, len(open_rows(rows, split="")))
    if isinstance(rows, str) or rows is None:
        return limit or 256
    return len(rows) if limit is None else min(limit, len(rows))


def _with_policy(model: str, generator: Mapping[str, Any] | None, work: Callable[[Any], Any]) -> Any:
    """Start a generator of a model, return the result of `work(policy)`, and stop the generator."""
    from ..actors import Generator
    from ..engines import EngineSettings
    from ..engines.weights import load_config
    from ..runtime.controller import run

    if EngineSettings(**(generator or {})).engine == "embedded":
        load_config(Path(model))

    async def run_work() -> Any:
        return await work(await Generator.as_service(model, **(generator or {})))

    return _run_anywhere(lambda: run(run_work()))


def _run_anywhere(work: Callable[[], T]) -> T:
    """Call `work`, which runs an event loop, and return its result: in this thread, or in another one if a loop is
    already running, as in a notebook."""
    from ..runtime.controller import run_in_thread

    has_loop = False
    with suppress(RuntimeError):  # no loop is running here
        has_loop = asyncio.get_running_loop().is_running()
    return run_in_thread(work) if has_loop else work()
