"""Settings of a simulated run: those of a real run by the same names, and the seconds that each part takes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from ...config.sections import Section


class Lengths(Section):
    """Tokens of prompts and completions."""

    prompt: NonNegativeInt = 0
    """Tokens of a prompt."""
    mean: PositiveFloat = 256.0
    """Mean tokens of a completion, before `max_tokens` cuts."""
    spread: NonNegativeFloat = 0.5
    """Standard deviation of the logarithm of a completion's length: 0 makes all equal, 1 a long tail."""
    per_prompt: float = Field(0.5, ge=0, le=1)
    """Share of that variance that lies between prompts: completions of a hard one are all long."""
    max_tokens: PositiveInt = 1024
    """Longest completion."""
    values: list[PositiveInt] = Field(default_factory=list)
    """Lengths to draw from in place of the log-normal distribution, such as those of a run."""

    def _check(self) -> None:
        if self.values and self.differs("mean", "spread", "per_prompt"):
            raise ValueError("values takes the place of mean, spread and per_prompt: remove them")


class Generators(Section):
    """The generators, each with one engine."""

    replicas: PositiveInt = 1
    """Independent engines."""
    gpus: PositiveInt = 1
    """GPUs of one of them."""
    slots: PositiveInt = 256
    """Sequences decoded at once by one of them."""
    on_update: Literal["continue", "finish", "recompute"] = "continue"
    """Running sequences at a weight update, as `generator.on_update` of a run."""
    step_seconds: NonNegativeFloat = 0.02
    """Seconds of a decode step, however many rows it has: reading the weights."""
    row_seconds: NonNegativeFloat = 0.0
    """Further seconds of a decode step for each row: its products, and its keys and values."""
    token_seconds: NonNegativeFloat = 0.0
    """Seconds of a prompt's token; decoding waits meanwhile. A group computes its prompt once."""
    load_seconds: NonNegativeFloat = 0.0
    """Seconds in which new weights are read, while decoding continues."""
    grain: PositiveInt = 1
    """Tokens after which the ends of rows are looked at. More is faster and less exact: ends are late by half of it."""


class Rewards(Section):
    """Scoring a group."""

    seconds: NonNegativeFloat = 0.0
    """Median seconds of one response."""
    spread: NonNegativeFloat = 0.0
    """Standard deviation of their logarithm."""
    servers: NonNegativeInt = 0
    """Replicas that score one response after the other; 0: all responses are scored at once, when they come."""
    gpus: NonNegativeInt = 0
    """GPUs of one of them."""


class TrainerSettings(Section):
    """The trainer, and what the controller does in a step beside it."""

    gpus: PositiveInt = 1
    """GPUs of the trainer."""
    step_seconds: NonNegativeFloat = 0.0
    """Seconds of a training step that do not depend on its tokens."""
    token_gpu_seconds: NonNegativeFloat = 0.0
    """GPU-seconds of a token, of prompts too: more GPUs divide them evenly."""
    push_seconds: NonNegativeFloat = 0.0
    """Seconds in which the trainer publishes its weights."""
    pack_seconds: NonNegativeFloat = 0.0
    """Seconds in which the controller makes a batch, before the trainer has it."""
    pack_sample_seconds: NonNegativeFloat = 0.0
    """The same for each episode."""
    log_seconds: NonNegativeFloat = 0.0
    """Seconds in which the controller logs a step, after new weights are served: generators work meanwhile."""


class Checkpoints(Section):
    """Checkpoints of a run."""

    every: NonNegativeInt = 0
    """Steps between them; 0: none."""
    seconds: NonNegativeFloat = 0.0
    """Seconds in which training waits for one."""


class Faults(Section):
    """Failures of hardware, exponentially distributed in time."""

    gpu_hours: PositiveFloat | None = None
    """Mean hours between failures of one GPU; null: there are none."""
    generator_seconds: NonNegativeFloat = 60.0
    """Seconds until a lost generator serves again."""
    trainer_seconds: NonNegativeFloat = 300.0
    """Seconds until a lost trainer has its last checkpoint; the steps since then are repeated."""
    ending: float = Field(0.0, ge=0, le=1)
    """Share of failures that end the run, whatever it does: a person has to start it again."""


class SimulationSettings(Section):
    """A run to simulate."""

    steps: PositiveInt = 50
    """Training steps."""
    batch_size: PositiveInt = 64
    """Prompts of a step."""
    n_samples: PositiveInt = 8
    """Completions of a prompt."""
    max_policy_age: NonNegativeInt = 1
    """Versions that a trained token may be old; 0 is lock-step."""
    sync_interval: PositiveInt = 1
    """Steps between two weight updates."""
    order: Literal["fifo", "random"] = "fifo"
    """Of the replay buffer."""
    equal_rewards: float = Field(0.0, ge=0, le=1)
    """Share of groups whose rewards are all equal."""
    dynamic_sampling: NonNegativeFloat = 0.0
    """Times the batch that may be replaced in a step because their rewards are equal, as the algorithm's."""
    router: str = "least_loaded"
    """How a generator is chosen, see `forge.runtime.controller.routers`."""
    colocated: bool = False
    """Generators and trainer take turns on the same GPUs."""
    gpus: PositiveInt | None = None
    """All GPUs of the run: the trainer has those that generators and rewards leave. Null: as `trainer.gpus` says."""
    seed: int = 0
    """Of lengths, rewards and failures; prompts have the same lengths whatever else is set."""
    lengths: Lengths = Lengths()
    generators: Generators = Generators()
    rewards: Rewards = Rewards()
    trainer: TrainerSettings = TrainerSettings()
    checkpoint: Checkpoints = Checkpoints()
    faults: Faults = Faults()

    @property
    def generator_gpus(self) -> int:
        """GPUs of all generators."""
        return self.generators.replicas * self.generators.gpus

    @property
    def reward_gpus(self) -> int:
        """GPUs of all rewards."""
        return self.rewards.servers * self.rewards.gpus

    @property
    def trainer_gpus(self) -> int:
        """GPUs of the trainer."""
        if self.gpus is None:
            return self.trainer.gpus
        return self.gpus - self.reward_gpus - (0 if self.colocated else self.generator_gpus)

    @property
    def all_gpus(self) -> int:
        """GPUs of the run."""
        return self.trainer_gpus + self.reward_gpus + (0 if self.colocated else self.generator_gpus)

    def _check(self) -> None:
        if self.max_policy_age < self.sync_interval - 1:
            raise ValueError(
                f"max_policy_age {self.max_policy_age} is less than sync_interval {self.sync_interval} - 1: no step "
                "after the first of an interval would ever have a batch; raise max_policy_age"
            )
        if self.gpus is not None and self.trainer_gpus < 1:
            raise ValueError(
                f"gpus {self.gpus} leaves {self.trainer_gpus} for the trainer: lower generators.replicas or raise gpus"
            )
        if self.gpus is not None and self.trainer.differs("gpus"):
            raise ValueError("gpus and trainer.gpus exclude each other: remove one")
        if self.colocated and self.max_policy_age:
            raise ValueError("colocated components take turns: set max_policy_age to 0")
        if self.colocated and self.generator_gpus != self.trainer_gpus:
            raise ValueError(
                f"colocated generators have {self.generator_gpus} GPUs and the trainer {self.trainer_gpus}: they share "
                "the same"
            )
