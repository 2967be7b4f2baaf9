"""What surrounds a recipe's loop: everything is checked before the first process starts, and closed after the last."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from .actors.reward import load_reward
from .config import load_or_exit, to_dict
from .controller import ForgeError, run
from .models import build_small_model, resolve_model
from .observability import Run
from .sections import DatasetConfig, EvalConfig
from .store import VersionStore
from .types import Sample

Main = Callable[..., Coroutine[Any, Any, None]]


def launch(main: Main, config_type: type[Any], argv: list[str] | None = None) -> None:
    """Read the configuration, check model and data, then run `main(cfg, model, held_out, record, store)`.

    `model` is the model's local folder, `held_out` the problems to evaluate on, `record` the run's folder and `store`
    carries weights from trainer to generators. Bad input ends the program with one line and starts nothing.
    """
    cfg = load_or_exit(config_type, argv)
    try:
        model = (
            resolve_model(cfg.model)
            if cfg.model
            else build_small_model(f"{cfg.run.root}/{cfg.run.name}-initial", seed=cfg.seed, **cfg.from_scratch)
        )
        for name in [*cfg.reward.functions, *filter(None, [cfg.reward.accuracy])]:
            load_reward(name)
        held_out = check_data(cfg.dataset, cfg.eval, model, cfg.seed)
        if cfg.run.overwrite:
            check_overwrite(cfg, model)
        record = Run(**cfg.run, config=to_dict(cfg), steps=cfg.training.steps, tensorboard=cfg.metrics.tensorboard)
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(f"error: {error}") from None
    store = VersionStore.create()
    try:
        run(main(cfg, model, held_out, record, store))
    except ForgeError as error:
        raise SystemExit(f"error: {error}") from error
    finally:
        try:
            record.close()
        finally:
            store.close()


def check_overwrite(cfg: Any, model: str) -> None:
    """Refuse to overwrite a run with something that it is made from.

    Raises:
        ValueError: the model or the data lie in the folder that would be removed.
    """
    folder = (Path(cfg.run.root) / cfg.run.name).resolve()
    for name in (model, cfg.dataset.path, cfg.eval.path):
        if name is not None and Path(name).resolve().is_relative_to(folder):
            raise ValueError(f"run.overwrite would remove {name}, which this run reads: choose another run.name")


def check_data(dataset: DatasetConfig, evaluation: EvalConfig, model: str, seed: int) -> list[Sample]:
    """Open the dataset once to find what is wrong with it, and take the held-out problems.

    Raises:
        ValueError, FileNotFoundError: see `forge.data.dataset.PromptDataset`; or there is nothing to hold out.
    """
    from transformers import AutoTokenizer

    from .data.dataset import PromptDataset

    tokenizer = AutoTokenizer.from_pretrained(model)
    training = PromptDataset(tokenizer=tokenizer, seed=seed, **dataset)
    if not evaluation.problems:
        return []
    if dataset.task is not None:
        return training.held_out(evaluation.problems)
    if evaluation.path is None and str(dataset.path).endswith((".json", ".jsonl", ".parquet")):
        raise ValueError(
            f"{dataset.path} is a single file: set eval.path to a file of held-out problems, or eval.problems to 0"
        )
    path = evaluation.path or dataset.path
    settings = {**dataset, "path": path, "split": evaluation.split, "streaming": False, "shuffle": False}
    return PromptDataset(tokenizer=tokenizer, seed=seed, **settings).held_out(evaluation.problems)
