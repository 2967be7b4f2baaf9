"""The plan of a configuration: each component's memory, a step's seconds, and what would fit."""

from __future__ import annotations

from collections.abc import Callable
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
from .others import REWARD_REMEDY, count_elements, model_of, reward_plan, services_of
from .remedies import Change, engine_remedy, trainer_remedy
from .times import Work, decoding_cost, generation_seconds, scoring_seconds, training_seconds, update_seconds
from .trainers import ComponentPlan, kind_of, samples_of, trainer_plan

PROMPT = 0.5  # of the longest prompt and the longest completion: their means, where no run has measured them
DEVICES_PER_HOST = 8


@dataclass
class Plan:
    """The plan of a configuration.

    seconds: of a step's phases by name; empty without GPUs. notes: what to know, or to change. devices: GPUs that the
    configuration asks for, those of judges and verifiers included.
    """

    model: str
    machines: Machines
    devices: int
    components: list[ComponentPlan] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    step_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def elements(self) -> int:
        """Parameters of the model."""
        return self.components[0].elements

    @property
    def fits(self) -> bool:
        """Whether every component fits, and there are enough GPUs."""
        return all(component.fits for component in self.components) and self.devices <= self.machines.count


def make_plan(
    cfg: TrainingRecipe, folder: Path, name: str, machines: Machines, find: Callable[[str], Path], change: Change
) -> Plan:
    """The plan of a configuration, without weights and without a GPU.

    Args:
        folder: with the model's config.json.
        name: of the model.
        find: the folder with the config.json of another model, by its name.
        change: the configuration with other settings, for what would fit.

    Raises:
        ValueError: a model, or degrees of parallelism, that the trainer rejects.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    models = {service: model_of(cfg, service, (config, folder), find) for service in services_of(cfg)}
    trainers = ["trainer", *(service for service in models if kind_of(service) != "generator")]
    models["trainer"] = config, folder
    plan = Plan(name, machines, sum(gpus_needed(cfg).values()))
    plan.components += [trainer_plan(cfg, *models[service], service, machines) for service in trainers]
    own_engine = None
    if isinstance(cfg, RecipeConfig) and cfg.engine is not None and cfg.service("generator") is not None:
        models["generator"] = config, folder
        generators = ["generator", *(x for x in models if kind_of(x) == "generator" and x != "generator")]
        engines = [_plan_engine(cfg, *models[service], machines, service) for service in generators]
        plan.components += [component for component, _ in engines]
        own_engine = engines[0][1]
    try:
        rewards = reward_plan(cfg, config, machines, find)
        plan.components += [rewards] if rewards is not None else []
    except FileNotFoundError as error:
        # An ensemble names its models in a file that an earlier program writes.
        plan.notes.append(f"the reward's models are not in this plan: {error}")
    if machines.device.type == "cpu" or not plan.components[0].with_gpus:
        return plan

    _add_seconds(plan, cfg, config, own_engine)
    if plan.devices > machines.count:
        plan.notes.append(f"{plan.devices} GPUs are asked for, and there are {machines.count}")
    for component in plan.components:
        if component.fits:
            continue
        if component.name == "reward":
            plan.notes.append(REWARD_REMEDY)
        elif isinstance(cfg, RecipeConfig) and kind_of(component.name) == "generator":
            its_config, _ = models[component.name]
            plan.notes.append(engine_remedy(cfg, its_config, component.elements, machines, component.name))
        else:
            plan.notes.append(trainer_remedy(cfg, *models[component.name], component.name, machines, change))
    trained = 1 + sum(further.trains for further in getattr(cfg, "models", {}).values())
    if trained > 1:
        plan.notes.append(f"{trained} policies are trained at once: the seconds are those of the first")
    if "generation" in plan.seconds:
        longest = max(plan.seconds, key=plan.seconds.__getitem__)
        share = plan.seconds[longest] / plan.step_seconds
        plan.notes.append(f"{longest} takes longest, {share:.0%} of a step: give it more GPUs first")
    return plan


def _plan_engine(
    cfg: RecipeConfig, config: PreTrainedConfig, folder: Path, machines: Machines, service: str
) -> tuple[ComponentPlan, EngineMemory]:
    options = Options(**cfg.placement(service))
    device = machines.device if options.with_gpus else replace(machines.device, type="cpu")
    elements = count_elements(folder)
    memory = engine_memory(config, elements, cfg.generator, options.procs, device)
    parts = {"weights": memory.weights, "next version": memory.update, "cache": memory.cache, "others": memory.others}
    limits = f"{memory.sequences} of {cfg.generator.slots} slots at once with sequences of full length"
    if memory.most > cfg.generator.slots:
        limits += f"; generator.slots {memory.most} would fit"
    component = ComponentPlan(
        service,
        options.procs * options.num_replicas,
        options.with_gpus,
        {name: size for name, size in parts.items() if size},
        device.memory,
        limits=limits,
        has_room=memory.sequences >= 2,
        elements=elements,
    )
    return component, memory


def _add_seconds(plan: Plan, cfg: TrainingRecipe, config: PreTrainedConfig, engine: EngineMemory | None) -> None:
    device = plan.machines.device
    length = min(cfg.reach(config), cfg.training.seq_len)
    # Lengths are known once a run has measured them: until then they are half of what they may be.
    sampling = getattr(cfg, "grpo", None) or getattr(cfg, "distill", None)
    longest = min(length, sampling.max_tokens) if sampling is not None else length
    work = Work(cfg.training.batch_size * samples_of(cfg), PROMPT * max(1, length - longest), PROMPT * longest)
    ranks = cfg.placement("trainer")["procs"]
    plan.seconds["training"] = training_seconds(config, work, device, ranks, cfg.training.gradient_checkpointing)
    reference = cfg.service("ref_model")
    if reference is not None and "ref_model" not in cfg.idle:
        ranks = reference.procs * reference.num_replicas
        plan.seconds["reference"] = scoring_seconds(config, work, device, ranks)
    training = sum(plan.seconds.values())
    plan.step_seconds = training
    generator = cfg.service("generator")
    if engine is None or generator is None or sampling is None or not isinstance(cfg, RecipeConfig):
        return
    itemsize = 2 if cfg.generator.dtype == "bfloat16" else 4
    plan.seconds["generation"] = generation_seconds(
        config,
        work,
        device,
        replicas=generator.num_replicas,
        slots=max(1, engine.sequences),
        weights=active_elements(config, plan.elements) * itemsize / generator.procs,
        token_bytes=engine.token_bytes,
        decoding=decoding_cost(config, cfg.generator, device),
    )
    hosts = -(-plan.devices // DEVICES_PER_HOST)
    plan.seconds["weights"] = update_seconds(plan.elements * itemsize, device, hosts)
    training += plan.seconds["weights"]
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
