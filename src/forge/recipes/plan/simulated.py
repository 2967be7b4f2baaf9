"""A planned run in virtual time: the settings of a simulation with the durations of a plan."""

from __future__ import annotations

from ..rl_config import RLConfig
from ..simulate import SimulatedRun, SimulationSettings, simulate
from .components import Plan

AGES = (0, 1, 2, 4)
STEPS = 40  # of which the first fill the pipeline
SPREAD = 0.6  # of the logarithm of a completion's length, where no run has measured it
Line = tuple[dict[str, object], list[SimulatedRun]]


def simulation_of(plan: Plan, cfg: RLConfig) -> SimulationSettings:
    """The settings of a simulation of a planned run.

    Raises:
        ValueError: the plan has no seconds of generation and training.
    """
    work = plan.work
    decoding = plan.decoding
    if work is None or decoding is None:
        raise ValueError("--simulate needs a recipe that generates and trains on GPUs: see services in the file")
    trained = work.samples * (work.prompt + work.completion)
    learning = plan.seconds["training"] + plan.seconds.get("reference", 0.0)
    return SimulationSettings(
        steps=STEPS,
        batch_size=cfg.training.batch_size,
        n_samples=cfg.grpo.n_samples,
        max_policy_age=cfg.max_policy_age,
        sync_interval=cfg.training.sync_interval,
        order=cfg.async_.order,
        lengths={
            "prompt": round(work.prompt),
            "mean": work.completion,
            "spread": SPREAD,
            "max_tokens": cfg.grpo.max_tokens,
        },
        generators={
            "replicas": cfg.services.generator.num_replicas,
            "gpus": cfg.services.generator.procs,
            "slots": max(1, plan.sequences),
            "on_update": cfg.generator.on_update,
            # A decode step reads the weights once, and the keys and values of each row.
            "step_seconds": decoding.seconds(plan.decode_weights),
            "row_seconds": (work.prompt + work.completion / 2) * plan.token_bytes / decoding.rate,
            "load_seconds": plan.seconds["weights"] / 2,
        },
        trainer={
            "gpus": cfg.services.trainer.procs,
            "token_gpu_seconds": learning * cfg.services.trainer.procs / trained,
            "push_seconds": plan.seconds["weights"] / 2,
        },
    )


def simulated_ages(settings: SimulationSettings) -> list[Line]:
    """A simulation for each bound on the age of a trained token, lock-step first."""
    ages = [age for age in AGES if age >= settings.sync_interval - 1]
    return [({"max_policy_age": age}, [simulate(settings.model_copy(update={"max_policy_age": age}))]) for age in ages]
