"""Replay: a run computed again by its schedule, bit for bit, with any number of generators. See docs/inspect.md."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

from forge.actors.replay_buffer import ReplayBuffer
from forge.config import ConfigError, read
from forge.observability.console import log
from forge.observability.folder import CONFIG, MARK
from forge.observability.lines import appended_lines
from forge.observability.schedule import FORMAT, SCHEDULE, GroupEntry, SampleEntry, StepEntry, checksum_of
from forge.recipes.components import POLICY, Job, RLComponents, start_rl
from forge.recipes.hooks import Hooks
from forge.recipes.launch import run_recipe
from forge.recipes.rl import Loop
from forge.recipes.rl_config import RLConfig
from forge.recipes.schema import sample_seed
from forge.runtime.controller import ForgeError, endpoint
from forge.system.files import is_plain, write_atomic
from forge.types import Completion, Group, Sample, Spans
from forge_envs.rollout import turn_seeds


@dataclass(frozen=True)
class Schedule:
    """The schedule of a run: which weights drew which tokens, and what each step trained on.

    Attributes:
        recipe: the loop that ran, "module:class".
        by_hand: what was passed from Python, which no file records: hooks, an environment.
        steps: by number, without a gap.
        published: digest of the weights of each version that generators got.
        groups: all groups, dropped ones included, by the index of their prompt.
    """

    recipe: str
    by_hand: tuple[str, ...]
    steps: Mapping[int, StepEntry]
    published: Mapping[int, str]
    groups: Mapping[int, GroupEntry]


def read_schedule(folder: Path) -> Schedule:
    """Return the schedule in the folder of a run, with its checksums checked.

    Raises:
        ConfigError: there is none, or it is damaged or was edited; the message names line and step.
    """
    path = folder / SCHEDULE
    if not path.is_file():
        raise ConfigError(f"{folder} has no {SCHEDULE}: only RL runs of this version can be replayed")
    head: dict[str, Any] = {}
    steps: dict[int, StepEntry] = {}
    published: dict[int, str] = {}

    # Merged by prompt: a replay draws all samples of a prompt in one request, also if a part of them was dropped.
    samples: dict[int, dict[int, SampleEntry]] = defaultdict(dict)
    for location, line in _read_lines(path):
        try:
            if "format" in line:
                head = {**line, "by_hand": tuple(line["by_hand"]), "recipe": str(line["recipe"])}
            elif "published" in line:
                published[int(line["step"])] = line["published"]
            else:
                trained, dropped = _read_groups(line["groups"]), _read_groups(line["dropped"])
                entry = StepEntry(int(line["step"]), trained, dropped, dict(line["numbers"]))
                steps[entry.step] = entry
                for group in (*entry.groups, *entry.dropped):
                    samples[group.index].update(group.samples)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{location} is not a valid schedule entry: {type(error).__name__}: {error}") from None
    if not steps or head.get("format") != FORMAT:
        raise ConfigError(f"{path} has no step, or is of another version of forge")
    groups = {index: GroupEntry(index, entries) for index, entries in samples.items()}
    return Schedule(head["recipe"], head["by_hand"], steps, published, groups)


def find_difference(recorded: StepEntry, entry: StepEntry) -> str | None:
    """Return a sentence on the first difference of a replayed entry from the recorded one; None if they are equal."""
    if [group.index for group in recorded.groups] != [group.index for group in entry.groups]:
        return f"it trained on the prompts {_prompt_indices(recorded)}, and now on {_prompt_indices(entry)}"
    for group, replayed_group in zip(recorded.groups, entry.groups, strict=True):
        if group.samples.keys() != replayed_group.samples.keys():
            return f"prompt {group.index} had samples {[*group.samples]}, and now {[*replayed_group.samples]}"
        for number, sample in group.samples.items():
            replayed = replayed_group.samples[number]
            if sample.digest != replayed.digest or sample.spans != replayed.spans:
                versions = f"versions {_describe_spans(sample.spans)}, now {_describe_spans(replayed.spans)}"
                return f"sample {number} of prompt {group.index} has other tokens or log-probabilities ({versions})"
            if sample.reward != replayed.reward:
                rewards = f"the reward {sample.reward}, and now {replayed.reward} for the same tokens"
                return f"sample {number} of prompt {group.index} had {rewards}"

    for name, value in recorded.numbers.items():
        if value != entry.numbers.get(name):
            return f"{name} was {value!r}, and is {entry.numbers.get(name)!r} for the same rollouts"
    return None


def _read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the content of each line of a schedule. ConfigError: a line is not what the run wrote."""
    for number, (_, text) in enumerate(appended_lines(path), 1):
        location = f"{path}, line {number}"
        try:
            line = json.loads(text)
            location = f"{location} (step {line['step']})"
            checksum = line.pop("checksum")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ConfigError(f"{location} is damaged: {text[:60].decode(errors='replace')}") from None
        # The checksum is of the contents: another program may have written the same line with other spaces.
        if checksum != checksum_of(json.dumps(line, separators=(",", ":"))):
            raise ConfigError(f"{location} was changed after the run wrote it: its checksum differs")
        yield location, line


def _read_groups(lists: list[Any]) -> tuple[GroupEntry, ...]:
    if any(index < 0 for index, _, _ in lists):
        raise ValueError("the index of a prompt must be at least 0")
    return tuple(
        GroupEntry(
            int(index),
            {
                number: SampleEntry(tuple((int(version), int(count)) for version, count in spans), reward, digest)
                for number, spans, reward, digest in samples
            },
            str(dropped),
        )
        for index, dropped, samples in lists
    )


def _prompt_indices(entry: StepEntry) -> str:
    return ", ".join(str(group.index) for group in entry.groups)


def _describe_spans(spans: Spans) -> str:
    return " ".join(f"{version}x{count}" for version, count in spans) or "none"


REPLAYED = "replay.txt"  # in the folder of a replay, the checksum of the first step of the run that it replays
POLL = 0.02  # seconds between two checks of what the generators hold


def replay_run(folder: Path, *, until: int | None = None, replicas: int | None = None) -> Path:
    """Compute a run again, and compare each step with the run's schedule.

    Args:
        folder: of the run.
        until: the last step to compute; None for the last of the schedule.
        replicas: number of generators; None for as many as the run had.

    Returns:
        The folder of the new run, NAME-replay next to the folder NAME; an earlier replay of the same run is replaced.

    Raises:
        ConfigError: the run cannot be replayed, `until` is none of its steps, or the folder holds anything else.
        ReplayDiffers: a step differs from the schedule.
    """
    schedule = read_schedule(folder)
    last = max(schedule.steps)
    if until is not None and not 1 <= until <= last:
        raise ConfigError(f"--until must be a step of the schedule, 1 to {last}, got {until}")
    target = folder.resolve().with_name(f"{folder.resolve().name}-replay")
    overrides = [("run.name", target.name), ("run.overwrite", "true")]
    mark = checksum_of(schedule.steps[min(schedule.steps)].line())  # a run of the same name is not the same run
    if (target / MARK).exists() and (not is_plain(target / REPLAYED) or (target / REPLAYED).read_text() != mark):
        raise ConfigError(f"{target} is not a replay of this run and would be overwritten: move or rename it")
    if replicas is not None:
        overrides.append(("services.generator.num_replicas", str(replicas)))

    # The config.yaml of a run has every setting: other defaults in another version of forge change nothing.
    cfg = read(RLConfig, folder / CONFIG, overrides)
    cfg.run.root = str(folder.resolve().parent)
    # The schedule must determine all that the run computed.
    expected = f"{Loop.__module__}:{Loop.__qualname__}"
    for is_wrong, message in (
        (schedule.recipe != expected, f"it ran the loop {schedule.recipe}, and only {expected} can be replayed"),
        (schedule.by_hand, f"{' and '.join(schedule.by_hand)} came from Python, and no file has them"),
        (cfg.generator.engine == "vllm", "vLLM does not wait for weights at a token: only the embedded engine does"),
        (cfg.episode.agent is not None, "clients of agents ask when they like, and the schedule does not say when"),
        (cfg.reward.learns, "its reward learned from scores in an order that the schedule does not have"),
        (cfg.dataset.sampler is not None, "its sampler drew by rewards in an order that the schedule does not have"),
    ):
        if is_wrong:
            raise ConfigError(f"this run cannot be replayed: {message}")
    if cfg.from_scratch is not None:
        # The run built its model in a folder next to its own.
        cfg.from_scratch, cfg.model = None, f"{folder.resolve()}-initial"
    train = partial(train_by_schedule, schedule=schedule, until=until or last, mark=mark)
    return run_recipe(update_wrapper(train, train_by_schedule), cfg)


class ReplayDiffers(ForgeError):
    """Error: a replay differs from its schedule; the message names the step and the difference."""


class ScheduledBuffer(ReplayBuffer):
    """Replay buffer that returns and drops the groups given by a schedule.

    Args:
        batches: for each step the indices of its groups, in the order of training.
        reasons: why groups were dropped, by their index.
    """

    def __init__(self, batches: Mapping[int, Sequence[int]], reasons: Mapping[int, str], **settings: Any) -> None:
        super().__init__(capacity=1 << 30, **settings)
        self.items: list[Any]  # a run has groups only
        self.batches, self.reasons = batches, reasons

    @endpoint
    async def sample(self, version: int, batch_size: int) -> list[Any]:
        """Wait for all groups with which the run trained `version`, and return the groups in the run's order."""
        # Step n trains version n - 1.
        indices = self.batches[version + 1]
        async with self.changed:
            await self.changed.wait_for(lambda: {*indices} <= {group.index for group in self.items})
            groups = {group.index: group for group in self.items}
            self.items = [group for group in self.items if group.index not in indices]
        return [groups[index] for index in indices]

    def _reason_to_drop(self, item: Any) -> str | None:
        reason = self.reasons.get(item.index)
        if reason is None and not any(episode.reward is not None for episode in item.episodes):
            raise ReplayDiffers(f"prompt {item.index} was trained in the run, but cannot be scored in the replay")
        return reason


class ScheduledPolicy:
    """Policy for one group that samples each token with the weight version that sampled it in the run.

    Args:
        policy: the generators.
        group: its entries in the schedule.
        seed: of the group.
        samples: number of its samples.
    """

    def __init__(self, policy: Any, group: GroupEntry, seed: int, samples: int) -> None:
        self.policy, self.group = policy, group
        self.generate = self
        self.drawn = dict.fromkeys(range(samples), 0)  # tokens of complete requests, by sample
        self.seeds: dict[int, int] = {}  # of the request that runs, by sample
        self._turns = {number: turn_seeds(seed, number, 0) for number in self.drawn}  # seeds of the turns still to come
        self._numbers = {
            next(turns): number for number, turns in self._turns.items()
        }  # sample, by its next turn's seed

    def left(self, number: int) -> Spans:
        """Return the version spans of a sample that are still to be sampled."""
        entry = self.group.samples.get(number)
        already_drawn = self.drawn[number]
        spans: list[tuple[int, int]] = []
        for version, count in entry.spans if entry else ():
            skipped = min(count, already_drawn)
            already_drawn -= skipped
            if count > skipped:
                spans.append((version, count - skipped))
        return tuple(spans)

    def is_held(self, version: int, held_seeds: set[int]) -> bool:
        """Return whether no token is left for weights up to `version`; requests in `held_seeds` need newer weights."""
        for number in self.drawn:
            spans = self.left(number)
            if spans and spans[0][0] <= version and self.seeds.get(number) not in held_seeds:
                return False
        return True

    async def route(self, prompt: Any, n: int | None = None, *, seed: int, **sampling: Any) -> Any:
        """Generate like `Generator.generate`, by the schedule: all `n` samples, or with None one's next turn."""
        # A reward without an environment asks for all samples at once, an episode for its next turn.
        numbers = [self._next_sample(seed)] if n is None else [*range(n)]
        self.seeds |= dict.fromkeys(numbers, seed)
        answers: Completion | list[Completion] = await self.policy.generate.route(
            prompt, n=n, seed=seed, schedule=tuple(map(self.left, numbers)), **sampling
        )
        completions = [answers] if isinstance(answers, Completion) else answers
        for number, completion in zip(numbers, completions, strict=True):
            self.drawn[number] += len(completion.token_ids)
            del self.seeds[number]
        return answers

    def _next_sample(self, seed: int) -> int:
        """Return the sample whose next turn has this seed."""
        if seed not in self._numbers:
            raise ReplayDiffers(f"an episode of prompt {self.group.index} was restarted in the replay, not in the run")
        number = self._numbers.pop(seed)
        self._numbers[next(self._turns[number])] = number
        return number


class Replay(Loop):
    """RL loop driven by a schedule, which determines the weights that sample each token and the groups of each step."""

    def __init__(self, cfg: RLConfig, job: Job, parts: RLComponents, schedule: Schedule, until: int) -> None:
        super().__init__(cfg, job, parts)
        self.schedule, self.until = schedule, until
        steps = [entry for entry in schedule.steps.values() if entry.step <= until]
        # The version that drew the first token of each group that is still to be computed, by the group's index.
        self.unfinished: dict[int, int] = {}
        for index in sorted({group.index for entry in steps for group in (*entry.groups, *entry.dropped)}):
            spans = [sample.spans for sample in schedule.groups[index].samples.values()]
            self.unfinished[index] = min((first[0][0] for first in spans if first), default=0)
        self.active: dict[int, ScheduledPolicy] = {}
        self.changed = asyncio.Condition()

    async def rollouts(self) -> None:
        """Start the rollout of each prompt that the schedule has."""
        waiting = {*self.unfinished}
        last = max(waiting, default=-1)
        async with asyncio.TaskGroup() as tasks:
            while waiting:
                sample = await self.parts.dataset.sample.route()
                index = sample.prompt.index
                if index > last:
                    raise ReplayDiffers(f"the dataset has no prompt {min(waiting)}, which the schedule needs")
                if index in waiting:
                    waiting.discard(index)
                    tasks.create_task(self.rollout(sample))
        await asyncio.Event().wait()  # the run ends with its training

    async def rollout(self, sample: Sample) -> None:
        """Sample the group of one prompt as in the run, once its first weights are published, and store it."""
        prompt = sample.prompt
        async with self.changed:
            await self.changed.wait_for(lambda: self.published_version >= self.unfinished[prompt.index])
        # With the seed of the run the same weights draw the same tokens.
        seed = sample_seed(self.cfg.seed, prompt.index)
        count = self.cfg.grpo.n_samples
        policy = self.active[prompt.index] = ScheduledPolicy(
            self.parts.policy, self.schedule.groups[prompt.index], seed, count
        )
        episodes = await self.parts.env.rollout(policy, sample, n=count, seed=seed)
        del self.active[prompt.index]
        del self.unfinished[prompt.index]
        await self.parts.buffer.add.route(Group(episodes, prompt.index, sample.target, str(prompt)))

    def is_published(self, version: int) -> bool:
        """Return whether generators got the weights of this version."""
        return version in self.schedule.published

    async def publish(self, version: int) -> None:
        """Publish weights once all tokens of earlier versions are sampled. ReplayDiffers: the run had other weights."""
        while not await self.are_held():  # noqa: ASYNC110  # generators do not call back
            await asyncio.sleep(POLL)
        await super().publish(version)
        async with self.changed:
            self.changed.notify_all()
        identity = self.job.store.manifest(POLICY, version).digest
        logged = self.schedule.published.get(version, identity)
        if logged != identity:
            cause = "after the same rollouts" if version else "the model is not the run's"
            raise ReplayDiffers(
                f"step {version}: the replayed weights have digest {identity}, the run's {logged}, {cause}"
            )

    async def are_held(self) -> bool:
        """Return whether generators may load newer weights: all tokens of the published weights are sampled."""
        version = self.published_version
        due = [index for index, first_version in self.unfinished.items() if first_version <= version]
        if not due:
            return True
        # A prompt that is not started yet may have tokens of these weights as well.
        if not all(index in self.active for index in due):
            return False
        policies = [self.active[index] for index in due]
        held_seeds = {seed for seeds in await self.parts.policy.held.fanout() for seed in seeds}
        return all(policy.is_held(version, held_seeds) for policy in policies)

    def log_schedule(self, entry: StepEntry, dropped: list[tuple[str, Group]], metrics: dict[str, float]) -> None:
        """Write what a step trained on to the replay's schedule. ReplayDiffers: it is not what the run trained on."""
        whole_entry = self.record.log_schedule(entry, dropped, metrics)
        if (difference := find_difference(self.schedule.steps[entry.step], whole_entry)) is not None:
            raise ReplayDiffers(f"step {entry.step}: {difference}")

    async def run(self) -> None:
        """Compute the steps, and log that they equal the run's steps."""
        await super().run()
        log.info("steps %d to %d equal the run's, bit for bit", min(self.schedule.steps), self.until)


async def train_by_schedule(cfg: RLConfig, job: Job, schedule: Schedule, until: int, mark: str) -> None:
    """Train from step 1 to step `until` by a schedule; the recipe of a replay, whose folder gets the file `mark`."""
    write_atomic(job.record.folder / REPLAYED, mark)
    job.record.begin_schedule(schedule.recipe, ())
    parts = await start_rl(cfg, job, cfg.load_algorithm())
    steps = schedule.steps.values()
    trained = {group.index for entry in steps for group in entry.groups}
    dropped = {group.index: group.reason for entry in steps for group in entry.dropped if group.index not in trained}
    batches = {entry.step: [group.index for group in entry.groups] for entry in steps}
    buffer = await ScheduledBuffer.as_local(batches, dropped, keep_dropped=1 << 30)
    parts = replace(parts, buffer=buffer, state=replace(parts.state, buffer=buffer))
    # A hook ends the run, as `training.steps` would change the schedule of the learning rate.
    ends = Hooks(on_step=lambda step, metrics: step == until)
    await Replay(cfg, job._replace(hooks=ends), parts, schedule, until).run()
