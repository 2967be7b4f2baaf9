"""Preparing a run: its model, data and folder are opened and checked before the first process starts."""

import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config.plugin import resolve
from ..config.sections import to_dict
from ..data.config import DatasetConfig, RowsConfig
from ..models.architecture import max_length, rotary_limit
from ..models.find import build_small_model, check_classifier, check_family, resolve_model
from ..models.flops import peak_tflops
from ..models.hub import check_upload
from ..models.tokenizer import model_config, model_tokenizer
from ..observability import Run
from ..observability.console import log
from ..observability.folder import MARK, check_free
from ..observability.machine import gpu_name
from ..rewards.rules import load_reward
from ..runtime.store.versions import memory_folder
from ..system.files import free_bytes
from ..types import Sample
from .eval_config import EvalConfig
from .evaluation import load_sets
from .placement import check_hosts, check_shared
from .resume import Start, check_origin, write_origin
from .schema import TrainingRecipe

NOUNS = {"prompts": "prompt", "supervised": "row", "preferences": "pair"}  # of data, by its kind


def prepare_run(cfg: TrainingRecipe, start: Start) -> tuple[str, list[Any], dict[str, list[Sample]], Run]:
    """Check all that a run needs, and open its folder.

    Returns:
        The folder of its model, the held-out items of `eval`, the items of `eval.sets` by the set's name, and the run.

    Raises:
        ValueError, OSError, ImportError: the fault, in one line.
    """
    folder = Path(cfg.run.root) / cfg.run.name
    initial = Path(f"{cfg.run.root}/{cfg.run.name}-initial")
    overwrite = start.checkpoint is None and (cfg.run.overwrite or start.restart)

    # Copied before the number of rows bounds training.steps: a resumed run is compared with the settings as written.
    settings = to_dict(cfg)

    # The hub's client prints a line for each retry; the error that it raises is enough.
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)

    # What needs only the configuration comes first, so that a mistake there is reported within a second.
    if cfg.metrics.tensorboard or cfg.metrics.wandb or cfg.metrics.tracker:
        resolve("forge_trackers:check_trackers", "metrics")(to_dict(cfg.metrics))
    if cfg.checkpoint.push_to_hub is not None:
        check_upload(cfg.checkpoint.push_to_hub)
    check_hosts(cfg)

    # Architectures are checked before weights are downloaded.
    for name in filter(None, (cfg.model, *cfg.others().values())):
        check_family(name)
    other_models = [resolve_model(name) for name in cfg.others().values()]
    if start.checkpoint is None:
        check_free(folder, overwrite)
        if cfg.from_scratch is not None:
            model = build_small_model(initial, seed=cfg.seed, **cfg.from_scratch)
        else:
            model = resolve_model(str(cfg.model))
    else:
        # A resumed run continues with the model and data that it started with, wherever they are now.
        model = resolve_model(cfg.model or str(initial))
        check_origin(folder, [model, *other_models], local_paths(cfg.files))

    if cfg.dataset.images_field:
        mark_model = resolve("forge_families.images:mark_model", "dataset.images_field")
        model = mark_model(model, f"{cfg.run.root}/{cfg.run.name}-images")

    # Models before data: reading all rows may take minutes.
    check_model(cfg, model)
    check_shared(cfg, model)
    check_others(cfg, model, dict(zip(cfg.others(), other_models, strict=True)))
    cfg.check_tokenizer(model)
    cfg.check_reward()
    items, held_out = check_data(cfg.data(model), cfg.eval, model, cfg.seed, cfg.scorers)
    sets = load_sets(cfg.data(model), cfg.eval, model, cfg.seed)

    steps = cfg.training.steps if items is None else math.ceil(items / cfg.training.batch_size)
    if steps < cfg.training.steps:
        log.info(
            "the data ends after its epochs, %d %ss or %d steps of %d: so does the run, before training.steps = %d",
            *(items, NOUNS[cfg.dataset.kind], steps, cfg.training.batch_size, cfg.training.steps),
        )
        cfg.training.steps = steps

    warn_of_settings(cfg, held_out)
    check_space(cfg, model, folder)

    # A folder that is cleared must not hold what the new run reads.
    if overwrite or (start.checkpoint is None and (folder / MARK).exists()):
        check_overwrite(cfg, model)
    record = Run(
        cfg.run.name,
        settings,
        root=cfg.run.root,
        overwrite=overwrite,
        steps=cfg.training.steps,
        resume=start.checkpoint,
        start=start.step,
        peak=cfg.metrics.peak_tflops or peak_tflops(gpu_name()),
    )
    if start.checkpoint is None:
        write_origin(folder, [model, *other_models], local_paths(cfg.files))
    else:
        log.info("resuming from %s", start.checkpoint)

    if cfg.lora is not None and cfg.lora.quantize:
        rounded = f"{cfg.run.root}/{cfg.run.name}-{cfg.lora.quantize}"
        round_model = resolve("forge_families.four_bits:round_model", "lora.quantize")
        model = round_model(model, rounded, cfg.lora.targets, keep=start.checkpoint is not None)

    return model, held_out, sets, record


def check_space(cfg: TrainingRecipe, model: str, folder: Path) -> None:
    """Check that the disk and the shared memory have space for what the run is certain to write: a checkpoint or the
    exported model, and two versions of published weights.

    Raises:
        ValueError: names the path, the bytes that are needed and those that are free.
    """
    size = sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))

    # A checkpoint has the weights and two moments of each; the exported model comes alongside it.
    copies = 4 if cfg.checkpoint.every and cfg.lora is None else 1
    needs = {folder: copies * size}
    if cfg.engine is not None and cfg.lora is None:
        needs[memory_folder()] = 2 * size  # the version in use, and the next

    for path, needed in needs.items():
        if needed > free_bytes(path):
            fix = "docker run --shm-size makes it larger" if path == memory_folder() else "set run.root to another disk"
            raise ValueError(f"{path} needs {needed:,} free bytes, but has {free_bytes(path):,}: {fix}")


def warn_of_settings(cfg: TrainingRecipe, held_out: list[Any]) -> None:
    """Log a warning of settings that are allowed and probably a mistake: targets that are whole solutions, and keys
    that nothing reads.

    Args:
        held_out: items of the data.
    """
    if isinstance(cfg.dataset, DatasetConfig) and cfg.dataset.target_pattern is None:
        # Solutions of GSM8K and MATH mark their final answer so; responses would be compared with the whole solution.
        solutions = [sample.target for sample in held_out if re.search(r"####|\\boxed\{", sample.target or "")]
        if 2 * len(solutions) > len(held_out):
            log.warning(
                "dataset.target_field %s looks like a whole solution (%.60r): set dataset.target_pattern to the "
                "part that responses are compared with",
                cfg.dataset.target_field,
                solutions[0][-60:],
            )
    if unused := cfg.unused():
        log.warning("these settings have no effect in this configuration: %s", ", ".join(unused))


def check_model(cfg: TrainingRecipe, model: str) -> None:
    """Check that the trainer, the engine and a critic can load this model, and divide it over ranks as configured.

    Args:
        model: its folder.

    Raises:
        ValueError: names what does not fit.
        ImportError: the trainer's backend is not installed.
    """
    from ..engines.weights import check_head, load_config

    config = model_config(model)
    cfg.trainer.check_model(config)
    cfg.training.check(config)
    check_head(Path(model), config)
    engine = cfg.engine

    if engine is not None:
        engine.check(config)
        if engine.engine == "embedded":
            load_config(Path(model))
        elif engine.engine == "vllm":
            resolve("forge_vllm.arguments:check_keys", "generator.engine")(config)

    cfg.parallelism.check(config)
    if cfg.trainer.backend == "tinker":
        resolve("forge_tinker.remote:check_address", "trainer.backend")(cfg.model or model)
    if cfg.trainer.backend == "titan":
        resolve("forge_titan.setup:check_layout", "trainer.backend")(
            cfg.layout("trainer").over(cfg.placement("trainer")["procs"]), config
        )

    for scalar in cfg.scalar(model):
        config = model_config(resolve_model(scalar))
        check_classifier(config)
        cfg.parallelism.check(config)


def check_others(cfg: TrainingRecipe, model: str, models: dict[str, str]) -> None:
    """Check that additional models have the vocabulary of the trained model, and take sequences as long as it.

    Models that an agent only asks (`models.NAME`) read and write text, and are not checked.

    Args:
        model: folder of the trained model.
        models: folders, by the configuration key that names them, such as {"grpo.reference": folder}.

    Raises:
        ValueError: names what does not fit.
    """
    from ..engines.weights import check_head

    reach = cfg.reach(model_config(model))
    vocabulary = model_tokenizer(model).get_vocab()
    reference = cfg.service("ref_model")
    for key, folder in models.items():
        config = model_config(folder)
        check_head(Path(folder), config)
        is_trained = f"{key.removesuffix('.model')}.trainer" in cfg.placements()  # one of several policies
        if key.startswith("models."):
            if not is_trained:  # it reads and writes text, by its own tokenizer
                continue
        elif model_tokenizer(folder).get_vocab() != vocabulary:
            raise ValueError(
                f"{key}: the tokenizer of {folder} has other tokens than that of {model}: choose a model of the same "
                "family"
            )

        limit = max_length(config)
        rotary = rotary_limit(config)
        if limit < reach:
            message = (
                f"{key}: {folder} takes {limit} tokens, and sequences may have {reach}: set training.seq_len to {limit}"
            )
            # Beyond what its rotary embeddings extend to, transformers computes something without meaning. A policy's
            # requests would fail once the first episode is long.
            if is_trained or (rotary is not None and rotary[0] < reach):
                raise ValueError(message)
            log.warning("%s", message)

        if reference is not None and reference.procs > 1:
            cfg.parallelism.check(config)


def local_paths(paths: list[str]) -> list[str]:
    """Return the paths that exist on this machine; the others are hub ids."""
    return [path for path in paths if "{" not in path and Path(path).exists()]


def check_overwrite(cfg: TrainingRecipe, model: str) -> None:
    """Check that no input of a run lies in the run's folder, which is about to be removed.

    Raises:
        ValueError: names the model or the data file that lies in it.
    """
    folder = (Path(cfg.run.root) / cfg.run.name).resolve()
    for name in (model, *local_paths(cfg.files), cfg.eval.path, *cfg.others().values()):
        if isinstance(name, str) and Path(name).resolve().is_relative_to(folder):
            raise ValueError(f"run.overwrite would remove {name}, which the new run reads: choose another run.name")


def check_data(
    dataset: RowsConfig, evaluation: EvalConfig, model: str, seed: int, scorers: Sequence[Any] = ()
) -> tuple[int | None, list[Any]]:
    """Open the training data and the held-out data once, which checks them.

    Args:
        dataset: the section of the training data.
        evaluation: the section that says which items are held out.
        model: folder of the model, whose tokenizer reads the data.
        scorers: of responses. If one has `warning(targets)`, the text that it returns is logged.

    Returns:
        The number of training items in all epochs, None if they are endless; and the held-out items: samples, episodes
        or pairs.

    Raises:
        ValueError, FileNotFoundError: as in `forge.data.load.load_data`; or `eval` names no held-out data, or epochs
            are set for a stream, whose length is unknown.
    """
    from ..data.load import Mixture, load_data
    from ..data.prompts import PromptDataset

    tokenizer = model_tokenizer(model)
    training = load_data(tokenizer, kind=dataset.kind, seed=seed, **dataset)
    if isinstance(training, PromptDataset | Mixture):
        for scorer in (load_reward(scorer) if isinstance(scorer, str) else scorer for scorer in scorers):
            warning = scorer.warning(training.targets()) if hasattr(scorer, "warning") else None
            if warning:
                log.warning("%s", warning)

    # Epochs count items, and a stream does not say how many it has.
    streams = training.sources if isinstance(training, Mixture) else [training]
    if any(stream.epochs is not None and stream.size is None for stream in streams):
        raise ValueError(
            "dataset.epochs needs data of a known length, which streamed rows do not have: omit it, and set "
            "training.steps, or omit streaming"
        )

    if not evaluation.problems:
        return training.size, []

    # A procedural task holds problems out by itself; rows need a split or a file.
    if dataset.procedural and evaluation.path is None:
        return training.size, training.held_out(evaluation.problems)

    if evaluation.path is None:
        if dataset.sources is not None:
            raise ValueError("with dataset.sources, set eval.path to a file of held-out rows, or eval.problems to 0")
        if str(dataset.path).endswith((".json", ".jsonl", ".csv", ".tsv", ".parquet")):
            raise ValueError(
                f"{dataset.path} is a single file: set eval.path to a file of held-out problems, or eval.problems to 0"
            )

    settings = {
        **dataset,
        **{"path": evaluation.path or dataset.path, "task": None, "sources": None},
        **{"split": evaluation.split, "streaming": False, "shuffle": False},
    }
    if "epochs" in settings:
        settings["epochs"] = None
    held_out = load_data(tokenizer, kind=dataset.kind, seed=seed, **settings).held_out(evaluation.problems)

    # Results on rows that are also trained on would measure memory.
    if shared := sum(training.has(item) for item in held_out):
        log.warning(
            "%d of the %d held-out %ss are also in the training data, so their results say little about others: give "
            "eval.path other rows",
            *(shared, len(held_out), NOUNS[dataset.kind]),
        )

    return training.size, held_out
