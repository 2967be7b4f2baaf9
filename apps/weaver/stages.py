"""The stages of an ensemble: what is checked before the first, the responses, their scores, and one probability."""

from __future__ import annotations

import asyncio
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import yaml

from apps.weaver.config import FitConfig, WeaverConfig
from forge.actors import Generator
from forge.config import to_dict
from forge.data.load import load_data
from forge.models import check_family, open_tokenizer, resolve_model
from forge.recipes.schema import sample_seed
from forge.rewards.rules import load_reward
from forge.system.masking import without_secrets
from forge.types import Sample
from forge_verifiers import Panel, Rule
from forge_verifiers.actors import RemotePanel, VerifierActor
from forge_weaver import Aggregator, Problem, ScoreTable, fit_table, score_table

CONFIG = "config.yaml"
MADE = ("responses.jsonl", "scores.npz", "verifiers.yaml", "aggregator.npz", "distilled", "finished")


def check(cfg: WeaverConfig, folder: Path) -> tuple[str, list[Sample]]:
    """The model's folder and the prompts, once everything is checked; an earlier ensemble is removed.

    Raises:
        ValueError, OSError: the fault, in one line.
    """
    if (folder / CONFIG).exists() and not cfg.run.overwrite:
        raise FileExistsError(f"{folder} holds an ensemble: choose another run.name, or set run.overwrite to true")
    cfg.verifiers.check_sources()
    check_family(cfg.model)
    model, made = resolve_model(cfg.model), [(folder / name).resolve() for name in MADE]
    models = [*cfg.verifiers.reward_models, *cfg.verifiers.process_reward_models]
    plugins = [plugin["path"] for plugin in cfg.verifiers.plugins if isinstance(plugin.get("path"), str)]
    read = [model, *(spec.path for spec in models), *plugins]
    if cfg.distil is not None:
        read.append(resolve_model(cfg.distil.model))
    for path in read:
        if any(Path(path).resolve().is_relative_to(place) for place in made):
            raise ValueError(f"run.overwrite would remove {path}, which this run reads: choose another run.name")
    if cfg.collect.truth is not None:
        load_reward(cfg.collect.truth)
    data = load_data(open_tokenizer(model), kind="prompts", seed=cfg.seed, **cfg.dataset)
    samples = list(islice(data, cfg.collect.problems))
    if len(samples) < cfg.collect.problems:
        raise ValueError(f"collect.problems is {cfg.collect.problems}, and the data has {len(samples)}")
    for name in MADE:
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink(missing_ok=True)
    (folder / CONFIG).write_text(yaml.safe_dump(without_secrets(to_dict(cfg)), sort_keys=False))
    return model, samples


async def collect(cfg: WeaverConfig, model: str, samples: Sequence[Sample]) -> list[Problem]:
    """Responses of the model to each prompt."""
    how = cfg.collect
    policy = await Generator.options(**cfg.services.generator).as_service(
        model, temperature=how.temperature, max_tokens=how.max_tokens, **cfg.generator
    )
    drawn = await asyncio.gather(
        *(policy.generate.route(p, n=how.n_samples, seed=sample_seed(cfg.seed, p.index)) for p, _ in samples)
    )
    await policy.stop()
    return [
        Problem(prompt.text, [completion.text for completion in completions], target=target)
        for (prompt, target), completions in zip(samples, drawn, strict=True)
    ]


async def label(truth: str, problems: Sequence[Problem]) -> list[Problem]:
    """The same problems with what the reward function `truth` says of the responses: right from 1 on; NaN where it
    could not score."""
    panel = Panel([Rule(load_reward(truth), "truth")])
    scores = await asyncio.gather(*(panel.score(p.prompt, p.responses, p.target) for p in problems))
    labels = [np.where(np.isnan(found.values[:, 0]), np.nan, found.values[:, 0] >= 1) for found in scores]
    return [replace(problem, labels=known.tolist()) for problem, known in zip(problems, labels, strict=True)]


async def score(cfg: WeaverConfig, problems: Sequence[Problem]) -> ScoreTable:
    """The scores of all verifiers; logs the share of missing scores of each."""
    service = await VerifierActor.options(**cfg.services.verifiers).as_service(cfg.verifiers)
    table = await score_table(RemotePanel(service, await service.names.route()), problems)
    await service.stop()
    return table


def fit(cfg: FitConfig, table: ScoreTable) -> Aggregator:
    """Sees the labels of the first `labelled` problems and no others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it warns of is in its report
        return fit_table(table, **cfg)
