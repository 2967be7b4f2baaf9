"""The plan of a configuration: each component's memory, a step's seconds, and what would fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from forge.models.architecture import sparse_layers
from forge.recipes.placement import gpus_needed
from forge.recipes.rl_config import RLConfig
from forge.recipes.schema import RecipeConfig, TrainingRecipe
from forge.runtime.controller import Options

from .devices import Machines
from .generation import EngineMemory, engine_memory
from .others import REWARD_REMEDY, count_elements, is_further_generator, model_of, reward_plan, services_of
from .remedies import engine_remedy, longer_packs, trainer_remedy
from .times import (
    DecodingCost,
    Work,
    decoding_cost,
    generation_seconds,
    scoring_seconds,
    training_seconds,
    update_seconds,
)
from .trainers import ComponentPlan, TrainerPlan, kind_of, samples_of, trainer_plan

PROMPT = 0.5  # of the longest prompt and the longest completion: their means, where no run has measured them
DEVICES_PER_HOST = 8


@dataclass
class Plan:
    """The plan of a configuration.

    seconds: of a step's phases by name; empty without GPUs. notes: what to know, or to change. work: of a step.
    sequences: that an engine runs at once. decode_weights, token_bytes: what a decode step reads, and of each token.
    decoding: what such a step costs; None without seconds.
    devices: GPUs that the configuration asks for, those of judges and verifiers included.
    """

    model: str
    elements: int
    machines: Machines
    components: list[ComponentPlan] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    step_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    work: Work | None = None
    sequences: int = 0
    decode_weights: float = 0.0
    token_bytes: float = 0.0
    decoding: DecodingCost | None = None
    devices: int = 0

    @property
    def fits(self) -> bool:
        """Whether every component fits, and there are enough GPUs."""
        return all(component.fits for component in self.components) and self.devices <= self.machines.count


def make_plan(
    cfg: TrainingRecipe,
    folder: Path,
    name: str,
    machines: Machines,
    *,
    find: Callable[[str], Path] = Path,
    grows: bool = False,
    until: float = math.inf,
) -> Plan:
    """The plan of a configuration, without weights and without a GPU.

    Args:
        folder: with the model's config.json.
        name: of the model.
        find: the folder with the config.json of another model, by its name.
        grows: for GPUs that are still to be asked for; otherwise remedies keep to those that there are.
        until: when to stop looking for remedies, by `time.process_time`.

    Raises:
        ValueError: a model, or degrees of parallelism, that the trainer rejects.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    trainer = trainer_plan(cfg, config, folder, "trainer", machines)
    plan = Plan(name, trainer.elements, machines, [trainer.plan], devices=sum(gpus_needed(cfg).values()))
    models = {"trainer": (config, folder)}
    for service in services_of(cfg):
        models[service] = model_of(cfg, service, models["trainer"], find)
        if kind_of(service) != "generator":
            plan.components.append(trainer_plan(cfg, *models[service], service, machines).plan)
    engine = _engine(cfg, config, trainer.elements, machines)
    if engine is not None:
        plan.components.append(engine[0])
    for service in filter(is_further_generator, models):
        further_config, further_folder = models[service]
        elements = count_elements(further_folder)
        further = _engine(cfg, further_config, elements, machines, service)
        assert further is not None
        plan.components.append(further[0])
    try:
        rewards = reward_plan(cfg, config, machines, find)
    except FileNotFoundError as error:
        # An ensemble names its models in a file that an earlier program writes.
        rewards = None
        plan.notes.append(f"the reward's models are not in this plan: {error}")
    if rewards is not None:
        plan.components.append(rewards)
    _add_seconds(plan, cfg, config, trainer, engine and engine[1])
    if machines.device.type != "cpu" and trainer.plan.with_gpus:
        if plan.devices > machines.count:
            plan.notes.append(f"{plan.devices} GPUs are asked for, and there are {machines.count}")
        _add_remedies(plan, cfg, models, grows, until)
        _add_notes(plan, cfg)
        if grows and trainer.plan.fits and (longer := longer_packs(cfg, config, folder, machines)):
            plan.notes.append(longer)
    return plan


def _engine(
    cfg: TrainingRecipe, config: PreTrainedConfig, elements: int, machines: Machines, service: str = "generator"
) -> tuple[ComponentPlan, EngineMemory] | None:
    if cfg.service("generator") is None or not isinstance(cfg, RecipeConfig) or cfg.engine is None:
        return None
    options = Options(**cfg.placement(service))
    device = machines.device if options.with_gpus else replace(machines.device, type="cpu")
    memory = engine_memory(config, elements, cfg.generator, options.procs, device)
    parts = {"weights": memory.weights, "next version": memory.update, "cache": memory.cache, "others": memory.others}
    limits = f"{memory.sequences} of {cfg.generator.slots} slots at once with sequences of full length"
    if memory.most > cfg.generator.slots:
        limits += f"; generator.slots {memory.most} would fit"
    plan = ComponentPlan(
        service,
        options.procs * options.num_replicas,
        options.with_gpus,
        {name: size for name, size in parts.items() if size},
        device.memory,
        limits=limits,
        has_room=memory.sequences >= 2,
    )
    return plan, memory


def _add_seconds(
    plan: Plan, cfg: TrainingRecipe, config: PreTrainedConfig, trainer: TrainerPlan, engine: EngineMemory | None
) -> None:
    device = plan.machines.device
    # A device of which the memory alone is known has no rates.
    if device.type == "cpu" or not trainer.plan.with_gpus or not device.tflops:
        return
    length = min(cfg.reach(config), cfg.training.seq_len)
    # Lengths are known once a run has measured them: until then they are half of what they may be.
    sampling = getattr(cfg, "grpo", None) or getattr(cfg, "distill", None)
    longest = min(length, sampling.max_tokens) if sampling is not None else length
    completion = PROMPT * longest
    prompt = PROMPT * max(1, length - longest)
    work = Work(cfg.training.batch_size * samples_of(cfg), prompt, completion)
    plan.work = work
    settings = cfg.training
    plan.seconds["training"] = training_seconds(config, work, device, trainer.ranks, settings.gradient_checkpointing)
    reference = cfg.service("ref_model")
    if reference is not None and "ref_model" not in cfg.idle:
        ranks = reference.procs * reference.num_replicas
        plan.seconds["reference"] = scoring_seconds(config, work, device, ranks)
    generator = cfg.service("generator")
    if engine is None or generator is None or sampling is None or not isinstance(cfg, RecipeConfig):
        plan.step_seconds = sum(plan.seconds.values())
        return
    itemsize = 2 if cfg.generator.dtype == "bfloat16" else 4
    plan.sequences = engine.sequences
    plan.decoding = decoding_cost(config, cfg.generator, device)
    plan.decode_weights = active_elements(config, plan.elements) * itemsize / generator.procs
    plan.token_bytes = engine.token_bytes
    plan.seconds["generation"] = generation_seconds(
        config,
        work,
        device,
        replicas=generator.num_replicas,
        slots=max(1, engine.sequences),
        weights=plan.decode_weights,
        token_bytes=plan.token_bytes,
        decoding=plan.decoding,
    )
    hosts = -(-plan.devices // DEVICES_PER_HOST)
    plan.seconds["weights"] = update_seconds(plan.elements * itemsize, device, hosts)
    training = sum(seconds for name, seconds in plan.seconds.items() if name != "generation")
    age = cfg.async_.max_policy_age if isinstance(cfg, RLConfig) else 0
    # Old samples may be trained: generation runs beside training, and the slower one sets the pace.
    overlapped = max(plan.seconds["generation"], training)
    plan.step_seconds = overlapped if age else plan.seconds["generation"] + training


def active_elements(config: PreTrainedConfig, elements: int) -> float:
    """Parameters that are read for one token: of a mixture those of the chosen experts."""
    layers = len(sparse_layers(config))
    if not layers:
        return elements
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    idle = config.num_experts - config.num_experts_per_tok
    return elements - layers * idle * 3 * config.hidden_size * width


def _add_remedies(
    plan: Plan, cfg: TrainingRecipe, models: Mapping[str, tuple[PreTrainedConfig, Path]], grows: bool, until: float
) -> None:
    """Note for each component that does not fit what would."""
    machines = plan.machines
    for component in plan.components:
        if component.fits:
            continue
        name = component.name
        if name == "reward":
            plan.notes.append(REWARD_REMEDY)
            continue
        config, folder = models.get(name, models["trainer"])
        if kind_of(name) == "generator":
            assert isinstance(cfg, RecipeConfig)
            elements = count_elements(folder) if name in models else plan.elements
            plan.notes.append(engine_remedy(cfg, config, elements, machines, name))
            continue
        # At the start of a run there are so many GPUs and no more.
        spare = machines.count - (plan.devices - component.processes)
        ranks = math.inf if grows else spare // cfg.placement(name)["num_replicas"]
        plan.notes.append(trainer_remedy(cfg, config, folder, name, machines, most_ranks=ranks, until=until))


def _add_notes(plan: Plan, cfg: TrainingRecipe) -> None:
    trained = 1 + sum(further.trains for further in getattr(cfg, "models", {}).values())
    if trained > 1:
        plan.notes.append(f"{trained} policies are trained at once: the seconds are those of the first")
    if "generation" in plan.seconds:
        longest = max(plan.seconds, key=plan.seconds.__getitem__)
        share = plan.seconds[longest] / plan.step_seconds
        plan.notes.append(f"{longest} takes longest, {share:.0%} of a step: give it more GPUs first")
