"""The plan of a configuration: the memory of its components, what would fit where one does not, and both as text."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from forge.engines.cache import BLOCK
from forge.engines.interface import check_length
from forge.models.tokenizer import model_config
from forge.recipes.placement import RAISE, gpus_needed
from forge.recipes.schema import RecipeConfig, TrainingRecipe

from .components import ComponentPlan, engine_plan, kind_of, reward_plan, trainer_plan
from .devices import GB, Machines

REWARD_ADVICE = (
    "the reward fits with a lower batch_tokens of its models, dtype bfloat16, or fewer models: each of its processes "
    "has all of them"
)
FACTORS = (2, 4, 8)  # times as many ranks; also degrees of parallelism, which stay within a host
Settings = dict[str, str | int]  # by dotted keys
Change = Callable[[Settings], TrainingRecipe]  # returns the configuration with other settings; ValueError: invalid ones


@dataclass
class Plan:
    """Memory plan of a configuration: components, devices and whether they fit.

    model: its name. machines: the devices that the plan is for. devices: number of GPUs that the configuration asks
    for, including those of judges and verifiers. notes: sentences on what does not fit, and what would.
    """

    model: str
    machines: Machines
    devices: int
    components: list[ComponentPlan] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Return whether every component fits, and there are enough GPUs."""
        return all(component.fits for component in self.components) and self.devices <= self.machines.count


def make_plan(
    cfg: TrainingRecipe, folder: Path, name: str, machines: Machines, find: Callable[[str], Path], change: Change
) -> Plan:
    """Return the plan of a configuration, without weights and without a GPU.

    Args:
        folder: with the model's config.json.
        name: of the model.
        find: returns the folder with the config.json of another model, by its name.
        change: returns the configuration with other settings, to search for some that fit.

    Raises:
        ValueError: a model, or degrees of parallelism, that the trainer rejects.
    """
    if cfg.trainer.backend == "tinker":
        raise ValueError("trainer.backend tinker: trainer and generators are at a server, whose memory is not planned")
    plan = Plan(name, machines, sum(gpus_needed(cfg).values()))
    services = [setting.removeprefix("services.") for setting in cfg.placements()]
    additional = {
        service: folder_of(cfg, service, folder, find)
        for service in services
        if kind_of(service) in ("trainer", "critic", "ref_model", "generator")
        and service not in {"trainer", "generator", *cfg.idle}
    }
    trainers = ["trainer", *(service for service in additional if kind_of(service) != "generator")]
    folders = {"trainer": folder, "generator": folder, **additional}
    plan.components += [trainer_plan(cfg, folders[service], service, machines) for service in trainers]

    if isinstance(cfg, RecipeConfig):
        if cfg.engine is not None and cfg.service("generator") is not None:
            engines = [service for service in folders if kind_of(service) == "generator"]
            plan.components += [engine_plan(cfg, folders[service], service, machines) for service in engines]
        try:
            rewards = reward_plan(cfg, folder, machines, find)
            plan.components += [rewards] if rewards is not None else []
        except FileNotFoundError as error:
            # An ensemble names its models in a file that `forge weaver fit` writes.
            plan.notes.append(f"the reward's models are not in this plan: {error}")

    gpus = 0 if machines.type == "cpu" else machines.count
    if plan.devices > gpus:
        plan.notes.append(f"{plan.devices} GPUs are asked for, and there are {gpus}")
    elif plan.devices < gpus:
        plan.notes.append(f"{gpus - plan.devices} of the {gpus} GPUs are not used: {RAISE}")
    if machines.type == "cpu":
        return plan
    for component in plan.components:
        if not component.fits:
            is_reward = component.name == "reward"
            plan.notes.append(
                REWARD_ADVICE if is_reward else find_fix(cfg, folders[component.name], component, machines, change)
            )

    return plan


def folder_of(cfg: TrainingRecipe, service: str, own: Path, find: Callable[[str], Path]) -> Path:
    """Return the folder with the config.json of the model that a service holds.

    Args:
        service: such as "critic" or "models.rival.trainer".
        own: the folder of the run's model, which is returned if no setting names another for the service.
        find: returns the folder of a model by its name.

    Raises:
        ValueError: the configuration of a model cannot be read.
    """
    names = cfg.others()
    # A setting for the critic or the reference holds for all policies; without it each starts as its policy.
    keys = {"critic": ["critic.model"], "ref_model": ["grpo.reference"]}.get(kind_of(service), [])
    if service.startswith("models."):
        keys = [*keys, f"models.{service.split('.')[1]}.model"]
    name = next((names[key] for key in keys if key in names), None)
    return own if name is None else find(name)


def find_fix(cfg: TrainingRecipe, folder: Path, component: ComponentPlan, machines: Machines, change: Change) -> str:
    """Return a sentence on the cheapest change with which a component fits, or that none of those tried suffices.

    Args:
        folder: with the config.json of the component's model.
    """
    name = component.name
    is_engine = kind_of(name) == "generator"
    planned: Callable[..., ComponentPlan] = engine_plan if is_engine else trainer_plan

    for settings in engine_changes(cfg, folder, name) if is_engine else trainer_changes(cfg, name):
        try:
            changed = planned(change(settings), folder, name, machines)
        except ValueError:  # the model cannot be divided so
            continue
        if changed.fits:
            change_text = " and ".join(f"{key} {value}" for key, value in settings.items())
            result = f"{changed.total / GB:.1f} GB"
            if is_engine:
                result = f"{changed.sequences} sequences of full length at once"
            return f"the {name} fits with {change_text}: {result}"

    if is_engine:
        return f"the {name} fits with none of: more GPUs (vLLM), fewer generator.slots, a shorter generator.max_seq_len"
    return (
        f"the {name} fits with none of: recomputed activations, more GPUs, divided layers, a shorter training.seq_len"
    )


def trainer_changes(cfg: TrainingRecipe, name: str) -> Iterator[Settings]:
    """Yield changes of settings, the cheapest first, with which a trainer, critic or reference model may fit."""
    first: Settings = {}
    if not cfg.training.gradient_checkpointing and kind_of(name) != "ref_model":
        # The cheapest fix, and a part of the others where it is not enough.
        first = {"training.gradient_checkpointing": "true"}
        yield first

    now = cfg.placement(name)["procs"]
    procs = f"{section_of(name)}.procs"
    yield from (first | {procs: now * factor} for factor in FACTORS)

    # More ranks divide only weights and state; these divide the activations of a sequence as well.
    for count in (now, *(now * factor for factor in FACTORS)):
        ranks: Settings = {procs: count} if count != now else {}
        for dimension in ("context", "tensor"):
            degrees = [degree for degree in FACTORS if count % degree == 0]
            yield from (first | ranks | {f"parallelism.{dimension}_parallel_degree": degree} for degree in degrees)

    # Shorter packs come last, as they bound answers.
    lengths = [cfg.training.seq_len >> halvings for halvings in range(1, 12)]
    # A pack of less than 512 tokens would hold few complete answers.
    yield from (first | {"training.seq_len": length} for length in lengths if length >= 512)


def engine_changes(cfg: TrainingRecipe, folder: Path, name: str) -> Iterator[Settings]:
    """Yield changes of settings, the cheapest first, with which two sequences of full length may fit a generator."""
    assert isinstance(cfg, RecipeConfig)
    config = model_config(folder)

    # More GPUs keep all slots, and fewer slots keep the length of answers: shorter ones come last.
    if cfg.generator.engine == "vllm":
        key = f"{section_of(name)}.procs"
        counts = [cfg.placement(name)["procs"] * factor for factor in FACTORS]
        counts = [count for count in counts if config.num_key_value_heads % count == 0]
    else:  # its logits take memory for each slot
        key = "generator.slots"
        counts = [count for halvings in range(1, 12) if (count := cfg.generator.slots >> halvings) >= 2]

    for count in counts:
        yield {key: count}
    for halvings in range(1, 12):
        if (length := check_length(config, cfg.generator.max_seq_len) >> halvings) >= BLOCK:
            yield {"generator.max_seq_len": length}


def section_of(service: str) -> str:
    """Return the section of the configuration that places a service.

    >>> section_of("trainer"), section_of("models.rival.trainer")
    ('services.trainer', 'models.rival.trainer')
    """
    return service if service.startswith("models.") else f"services.{service}"


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the text lines of a memory plan for a terminal."""
    count, device, memory = plan.machines.count, plan.machines.device, plan.machines.memory
    machines = "CPU" if plan.machines.type == "cpu" else f"{count} x {device} ({memory / GB:.0f} GB)"
    yield f"{plan.model}: {plan.components[0].elements:,} parameters, on {machines}"
    yield ""
    width = max(10, *(len(component.name) for component in plan.components))

    for component in plan.components:
        # Host memory is what the machine has: only devices have a verdict.
        verdict = "fits" if component.fits else f"DOES NOT FIT {format_bytes(component.bound)}"
        processes = f"{component.processes} process{'es' if component.processes > 1 else ''}"
        line = f"{component.name:<{width}} {format_bytes(component.total):>8} in each of {processes}"
        yield f"{line}  {verdict}" if component.with_gpus else line
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in component.parts.items())
        moment = f"the most at: {component.moment}" if component.moment else ""
        yield from (f"{'':<{width}} {text}" for text in (parts, moment, component.limits) if text)

    yield from (f"note: {note}" for note in plan.notes)


def format_bytes(size: float) -> str:
    """Return a number of bytes in GB, or in MB below a tenth of one.

    >>> format_bytes(3_000_000_000)
    '3 GB'
    """
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
