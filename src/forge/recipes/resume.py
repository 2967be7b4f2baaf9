"""Resuming a run: which one, from which checkpoint, and whether it is still the same run."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ..config.arguments import Arguments, read
from ..config.sections import ConfigError, flatten_config, to_dict
from ..observability.console import log
from ..observability.folder import FINISHED, MARK, made_no_step
from ..system.checksums import CHECKSUMS, DamagedFile, check_files, read_sealed, write_sealed
from ..system.masking import MASK, without_secrets
from .schema import TrainingRecipe

C = TypeVar("C", bound=TrainingRecipe)

# The settings that a resumed run may change; any other change would make it another run. A name with a dot at its end
# stands for a whole section. `model` may move, since its content is compared.
MAY_CHANGE = (
    "model",
    "training.steps",
    "training.gradient_accumulation_steps",
    "training.gradient_checkpointing",
    "training.cpu_offload",
    "training.compile",
    "training.exact",
    "generator.slots",
    "generator.max_seq_len",
    "services.",
    "colocated",
    "parallelism.",
    "checkpoint.",
    "eval.",
    "metrics.",
    "run.",
)

# The settings whose change gives a finished run something to do again.
GOALS = ("training.steps", "eval.stop_at")
ORIGIN = "origin.json"
MODEL_FILES = (".json", ".safetensors", ".bin", ".txt", ".model", ".jinja")
# A file's digest covers its size and 256 samples of 64 KiB, evenly spread: enough, as training changes all weights.
SAMPLES, SAMPLE = 256, 1 << 16


@dataclass(frozen=True)
class Start:
    """Starting point of a run: the beginning or a checkpoint.

    Attributes:
        checkpoint: the folder of the checkpoint that it resumes from; None: it starts with its first step.
        step: of the checkpoint.
        finished: whether the run is complete, so that there is nothing to do.
        restart: whether the same run ended before its first checkpoint, and is overwritten.
    """

    checkpoint: str | None = None
    step: int = 0
    finished: bool = False
    restart: bool = False


def read_config(cls: type[C], arguments: Arguments) -> C:
    """Return the configuration of a command line: the file of `--config`, or without it the one that the resumed run
    has saved, with the settings of the command line.

    Args:
        cls: class of the configuration.

    Raises:
        ConfigError: it is invalid, as in `forge.config.read`; the run to resume does not exist, or is not the
            configured one.
    """
    if arguments.resume in (None, "auto"):
        if arguments.config is None:
            raise ConfigError("--config FILE is missing")
        return read(cls, arguments.config, arguments.overrides)

    folder = Path(arguments.resume)  # type: ignore[arg-type]
    folder = folder if folder.name else folder.resolve()
    if not folder.is_dir():
        raise ConfigError(f"--resume {folder}: the run directory does not exist")

    _read_previous(folder)
    cfg = read(cls, arguments.config or folder / "config.yaml", arguments.overrides)

    if arguments.config is None and not any(name.startswith("run.") for name, _ in arguments.overrides):
        # The folder may have been moved since, or be named relative to another directory.
        cfg.run.root = str(folder.parent)
        cfg.run.name = folder.name
    elif (Path(cfg.run.root) / cfg.run.name).resolve() != folder.resolve():
        raise ConfigError(
            f"--resume {folder}: the configuration is of the run {Path(cfg.run.root) / cfg.run.name}: omit run.name "
            "and run.root"
        )

    return cfg


def find_start(cfg: TrainingRecipe, resume: str | None) -> Start:
    """Return where the run of this configuration starts, and set damaged checkpoints aside if it resumes.

    Args:
        resume: the run's folder: continue from its newest checkpoint; "auto": likewise if the folder exists; None:
            start at step 0.

    Raises:
        ConfigError: there is no undamaged checkpoint to resume from, the folder holds another run, or its newest
            checkpoint is beyond `training.steps`.
    """
    folder = Path(cfg.run.root) / cfg.run.name
    if resume not in (None, "auto") and Path(str(resume)).absolute() != folder.absolute():
        raise ConfigError(
            f"--resume {resume} is another directory than {folder} (run.root and run.name): give that directory, or "
            "auto"
        )

    if resume == "auto" and not cfg.checkpoint.every:
        raise ConfigError("--resume auto needs checkpoint.every, because without checkpoints nothing can be resumed")
    if resume is None or (resume == "auto" and not (folder / MARK).exists()):
        return Start()

    from ..training import checkpoint  # imported here, as it loads all that a trainer needs

    # Find the newest undamaged checkpoint. Damaged ones are renamed only once it is clear that the run resumes.
    newest: Path | None = None
    damaged: dict[Path, str] = {}
    for path in reversed(checkpoint.list_checkpoints(folder / "checkpoints")):
        if (damage := _find_damage(path)) is None:
            newest = path
            break
        damaged[path] = damage

    if newest is None and damaged:
        raise ConfigError(f"--resume {folder}: {next(iter(damaged.values()))}, and there is no older checkpoint")
    if newest is None:
        if resume != "auto":
            raise ConfigError(f"--resume {folder}: the run has no checkpoint to resume from")
        if cfg.run.overwrite or made_no_step(folder) or _ended_early(cfg, folder):
            log.info("%s has no checkpoint yet: starting again", folder)
            return Start(restart=True)
        raise ConfigError(
            f"{folder} holds an earlier run without a checkpoint to resume from: choose another run.name, or set "
            "run.overwrite to true"
        )

    if not cfg.checkpoint.every:
        raise ConfigError(
            f"--resume {folder} needs checkpoint.every: without checkpoints it could not be resumed again"
        )

    # Settings that would make it another run are an error; the others take effect from here on.
    changed = find_changes(_read_previous(folder), cfg)
    forbidden = next((change for change in changed if not change[0].startswith(MAY_CHANGE)), None)
    if forbidden is not None:
        # If the user sets `model`, from_scratch changes as well: the message then names the model.
        of_model = next((change for change in changed if change[0] == "model"), forbidden)
        name, was, now = of_model if forbidden[0].startswith("from_scratch.") else forbidden
        raise ConfigError(
            f"--resume {folder}: {name} was {was!r} and is {now!r}; this setting cannot change on resume: start a new "
            "run"
        )

    step = checkpoint.step_of(newest)
    if step > cfg.training.steps:
        raise ConfigError(
            f"--resume {folder}: the run is at step {step} already, and training.steps is {cfg.training.steps}: raise "
            "training.steps"
        )

    # A finished run resumes only if a changed setting gives it more to do.
    has_new_goal = any(name in GOALS for name, _, _ in changed)
    has_model = (folder / "model" / "config.json").exists()
    finished = (folder / FINISHED).exists() and has_model and not has_new_goal
    for path, fault in damaged.items():
        renamed = checkpoint.set_aside(path)
        log.warning("--resume %s: %s; it is now %s, resuming from %s", folder, fault, renamed.name, newest.name)

    return Start(str(newest), step, finished)


def _find_damage(checkpoint: Path) -> str | None:
    """Return what is damaged in a checkpoint, or in the critic's checkpoint of the same step if the run has a critic,
    in one line; None if nothing is."""
    from ..training.checkpoint import list_checkpoints, step_of

    critic = checkpoint.parent / "critic"
    try:
        check_files(checkpoint)
        if critic.is_dir():
            critics = {step_of(path): path for path in list_checkpoints(critic)}
            check_files(critics.get(step_of(checkpoint), critic / checkpoint.name))
    except DamagedFile as error:
        return str(error)
    return None


def _read_previous(folder: Path) -> dict[str, Any]:
    """Return the configuration that a run has saved, as {dotted key: plain value}.

    It is not built again, since objects that were passed from Python are in it only by name, and secrets are masked.

    Raises:
        ConfigError: the folder has no configuration, or a damaged one.
    """
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"--resume {folder}: not a run directory (no config.yaml)")
    try:
        return flatten_config(without_secrets(yaml.safe_load(read_sealed(folder / "config.yaml"))))
    except DamagedFile as error:
        raise ConfigError(f"--resume {folder}: {error}. Settings are changed as --section.key VALUE") from None


def _ended_early(cfg: TrainingRecipe, folder: Path) -> bool:
    """Return whether the folder holds the same run, unfinished, with checkpoints enabled."""
    before = _read_previous(folder)
    is_same_run = all(name.startswith(MAY_CHANGE) for name, _, _ in find_changes(before, cfg))
    return is_same_run and before["checkpoint.every"] > 0 and not (folder / FINISHED).exists()


def find_changes(before: dict[str, Any], cfg: TrainingRecipe) -> list[tuple[str, Any, Any]]:
    """Return (dotted key, old value, new value) of each setting that differs from a run's saved configuration.

    Args:
        before: {dotted key: value}, as saved; a masked value equals any new one.
        cfg: the configuration now.
    """
    now = flatten_config(without_secrets(to_dict(cfg)))
    pairs = {name: (before.get(name), now.get(name)) for name in {**before, **now}}
    return [(name, was, new) for name, (was, new) in pairs.items() if was not in (new, MASK)]


def write_origin(folder: Path, models: list[str], data: list[str]) -> None:
    """Write digests of the files that a run is made from, for `check_origin`: its models, and its local data files."""
    write_sealed(folder / ORIGIN, json.dumps(_digest_files(models, data), indent=1) + "\n")


def check_origin(folder: Path, models: list[str], data: list[str]) -> None:
    """Check that the files of the models and the data are those that the run was made from.

    Raises:
        ConfigError: names the file that has changed.
    """
    if not (folder / ORIGIN).exists():
        raise ConfigError(f"--resume {folder}: the file {ORIGIN} is missing, so its model and data cannot be checked")

    try:
        saved_digests = json.loads(read_sealed(folder / ORIGIN))
        current_digests = _digest_files(models, data)
    except DamagedFile as error:
        raise ConfigError(f"--resume {folder}: {error}") from None

    for name in sorted({**saved_digests, **current_digests}):
        if saved_digests.get(name) != current_digests.get(name):
            position, _, file = name.partition(" ")  # as `_digest_files` writes them
            source = dict(enumerate([*models, *data])).get(int(position), "a place that is no longer read")
            raise ConfigError(f"--resume {folder}: {Path(source) / file} has changed since the run started")


def _digest_files(models: list[str], data: list[str]) -> dict[str, str]:
    """Return {"POSITION FILE": digest} of all files: POSITION is the index of the folder among `models` and `data`,
    FILE the path within it, so that a folder may move."""
    digests: dict[str, str] = {}
    for position, source in enumerate(map(Path, [*models, *data])):
        files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
        if position < len(models):
            # Of a model folder only what a model is made of: caches and notes in it may change.
            model_files = (path for path in files if path.parent == source and path.suffix in MODEL_FILES)
            files = [path for path in model_files if path.name != CHECKSUMS]
        digests |= {
            f"{position} {path.relative_to(source) if path != source else ''}": _digest_file(path) for path in files
        }
    return digests


def _digest_file(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        # Samples are evenly spread, and include the first and the last bytes.
        for number in range(SAMPLES):
            file.seek(max(0, size - SAMPLE) * number // (SAMPLES - 1))
            digest.update(file.read(SAMPLE))
            if size <= SAMPLE:
                break
    return digest.hexdigest()
