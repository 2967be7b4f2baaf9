"""Distil an ensemble into one small sequence classifier on prompts and responses."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from scipy.special import expit as sigmoid
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from forge.models import quiet_loading
from forge_verifiers.models import TokenRow
from forge_verifiers.reward_model import RewardModel

from .calibration import Recalibration, auc, ece
from .selection import selection_accuracy
from .table import ScoreTable
from .verifiers import DISTILLED

HELD_OUT = 0.2  # share of the problems: half of them calibrate, half are reported


@dataclass(frozen=True)
class DistilReport:
    """Evaluation of a distilled model on held-out problems.

    Args:
        parameters: number of parameters of the model.
        trained: number of responses that were trained on.
        tested: number of responses that this report evaluates.
        left_out: number of responses that are empty or exceed the model's context.
        error: mean absolute difference of the model's and the ensemble's probability.
        agreement: fraction of responses for which both probabilities are on the same side of 1/2.
        gap: expected calibration error of the model against the ensemble's probability.
        truth: metrics against known labels, {"distilled": {"auc": ..., "selection": ..., "ece": ...}, "ensemble": ...};
            empty without labels.
        ranking: area under the ROC curve of the model, where a response is positive if the ensemble's probability is
            above 1/2; NaN if all are on one side.
        chance: the area that a model without skill reaches by chance: 1/2 and two standard errors.
    """

    parameters: int
    trained: int
    tested: int
    left_out: int
    error: float
    agreement: float
    gap: float
    truth: dict[str, dict[str, float]]
    ranking: float = math.nan
    chance: float = math.nan

    def __str__(self) -> str:
        lines = [
            f"{self.parameters / 1e6:.2f}M parameters, trained on {self.trained} responses, {self.left_out} left out",
            f"on {self.tested} others: {self.agreement:.3f} on the ensemble's side of 1/2, mean difference "
            f"{self.error:.3f}, calibration error {self.gap:.3f}",
        ]
        for name, metrics in self.truth.items():
            numbers = ", ".join(f"{key} {value:.3f}" for key, value in metrics.items())
            lines.append(f"{name} against the truth: {numbers}")

        # A model that learnt nothing has a low error all the same, if the ensemble's probabilities vary little.
        if self.ranking < self.chance:
            lines.append(
                f"warning: the model ranks responses no better than chance (area under the curve {self.ranking:.3f} "
                f"against the ensemble, {self.chance:.3f} by chance): train longer, at a higher learning rate, or "
                "start from a pretrained encoder"
            )

        return "\n".join(lines)


def distil(
    table: ScoreTable,
    probabilities: np.ndarray,
    model: str | Path,
    folder: str | Path,
    *,
    epochs: int = 4,
    batch_size: int = 64,
    learning_rate: float = 5e-5,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
    **reading: Any,
) -> DistilReport:
    """Train a one-class sequence classifier on the probabilities, calibrate it and save it to `folder`, atomically.

    The loss is the cross-entropy to the ensemble's probability (Saad-Falcon et al. 2025, section 6). Prompts are split
    at random: 80 % train the model, 10 % fit its calibration (Platt 1999), and the report is on the other 10 %.
    Responses without a probability and texts that exceed the model's context are left out.

    Args:
        table: with prompts and responses. Labels are used only for the report.
        probabilities: [problems, responses] of the ensemble, NaN for none.
        model: folder or hub id of a model with a transformers sequence classification head, usually an encoder.
        folder: must be empty or absent.
        say: called with a log line after each epoch.
        **reading: how prompt and response become one text, and `max_tokens`; see `forge_verifiers.RewardModel`.

    Raises:
        ValueError: no texts, mismatched shapes, too few prompts, invalid settings, or a folder that is not empty.
    """
    # Everything that can be wrong is checked before the model is loaded.
    if table.prompts is None or table.responses is None:
        raise ValueError("distillation needs a score table with prompts and responses, got scores only")
    if probabilities.shape != table.present.shape:
        raise ValueError(
            f"probabilities have shape {probabilities.shape}, but must have the shape {table.present.shape} of the "
            "responses"
        )
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: choose another folder for the distilled verifier")
    indices = np.argwhere(table.present & ~np.isnan(probabilities))
    _divide_responses([table.prompts[i] for i in indices[:, 0]], seed)  # fail early, before loading the model

    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        aside = Path(temporary) / folder.name
        _new_classifier(model, aside, seed)
        with quiet_loading():
            reader = RewardModel(aside, **reading)
        rows = [reader.row(table.prompts[i], table.responses[i][j]) for i, j in indices]

        # Responses that do not fit are left out, so the prompts are split again, with the same seed.
        fits = np.array([0 < len(row.ids) <= reader.model.max_tokens for row in rows])
        indices, rows = indices[fits], [row for row, fit in zip(rows, fits, strict=True) if fit]
        train, calibrate, test = _divide_responses([table.prompts[i] for i in indices[:, 0]], seed)
        targets = probabilities[tuple(indices.T)]

        # The saved model gives logits before calibration, which is in a file next to it.
        _train_classifier(reader, rows, targets, train, epochs, batch_size, learning_rate, seed, say)
        with quiet_loading():
            reader.model.model.save_pretrained(aside)

        # Calibrate on one half of the held-out problems; equal targets determine no calibration.
        logits = np.full(len(rows), np.nan)
        held_out = np.concatenate([calibrate, test])
        outcomes = reader.model.stream([rows[i] for i in held_out], lambda batch: reader.logits(batch).tolist())
        for position, logit in outcomes:
            logits[held_out[position]] = logit
        scale = Recalibration()
        if np.ptp(targets[calibrate]) > 0:
            scale = Recalibration.fit(sigmoid(logits[calibrate]), targets[calibrate])

        # Report on the other half. `chance` is by the variance of the area under the curve for a random order.
        student = scale(sigmoid(logits[test]))
        sides = (targets[test] > 0.5).astype(float)
        report = DistilReport(
            parameters=sum(weights.numel() for weights in reader.model.model.parameters()),
            trained=len(train),
            tested=len(test),
            left_out=int((~fits).sum()),
            error=float(np.abs(student - targets[test]).mean()),
            agreement=float(((student > 0.5) == sides).mean()),
            gap=ece(student, targets[test]),
            truth=_measure_truth(table, indices[test], student, targets[test]),
            ranking=auc(student, sides),
            chance=0.5 + 2.0 * math.sqrt((1 / max(1, sides.sum()) + 1 / max(1, (1 - sides).sum())) / 12),
        )
        settings = {"slope": scale.slope, "intercept": scale.intercept, "scale": "probability", **reading}
        (aside / DISTILLED).write_text(json.dumps({"reading": settings, "report": asdict(report)}, indent=1))
        aside.rename(folder)

    return report


def _new_classifier(model: str | Path, folder: Path, seed: int) -> None:
    """Save the model to `folder` with a head of one class: its own, or a new one initialised from the seed.

    The head of a decoder reads the last token before the padding, so padding gets a separate token if it has none.
    """
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    torch.manual_seed(seed)
    with quiet_loading():
        classifier = AutoModelForSequenceClassification.from_pretrained(
            model,
            num_labels=1,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
            use_safetensors=True,
        )

        if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
            tokenizer.add_special_tokens({"pad_token": "<pad>"})
            classifier.resize_token_embeddings(max(len(tokenizer), classifier.get_input_embeddings().num_embeddings))

        classifier.config.pad_token_id = tokenizer.pad_token_id
        classifier.save_pretrained(folder)

    tokenizer.save_pretrained(folder)


def _divide_responses(prompts: list[str], seed: int) -> list[np.ndarray]:
    """Return the indices of the training, of the calibration and of the test responses, split by prompt.

    Args:
        prompts: of each response.

    Raises:
        ValueError: too few different prompts.
    """
    unique_prompts, prompt_of = np.unique(prompts, return_inverse=True)
    count = len(unique_prompts)
    drawn = np.random.default_rng(seed).permutation(count)
    half = int(count * HELD_OUT / 2)
    if half < 1:
        raise ValueError(
            f"{count} prompts with a probability and texts within the length limit are too few: at least "
            f"{math.ceil(2 / HELD_OUT)}"
        )
    calibration, test, training = drawn[:half], drawn[half : 2 * half], drawn[2 * half :]
    return [np.flatnonzero(np.isin(prompt_of, subset)) for subset in (training, calibration, test)]


def _train_classifier(
    reader: RewardModel,
    rows: list[TokenRow],
    targets: np.ndarray,
    train: np.ndarray,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    say: Callable[[str], None],
) -> None:
    """Train the reader's model by AdamW to give the rows with indices `train` their target probabilities.

    Args:
        rows: the texts of all responses, as tokens.
        targets: [rows] probabilities.
        train: indices of the rows to train on.
        say: called with a log line after each epoch.
    """
    model, rng = reader.model.model.train().requires_grad_(True), np.random.default_rng(seed)
    targets_on_device = torch.tensor(targets, dtype=torch.float32, device=reader.model.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)

    # A linear schedule: 5 % of the steps to warm up, then down to 5 % of the learning rate.
    steps = epochs * math.ceil(len(train) / batch_size)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warmup) * (1.0 - 0.95 * step / steps)
    )

    torch.manual_seed(seed)  # dropout
    for epoch in range(epochs):
        # The order of each epoch follows from the seed only.
        order, total = rng.permutation(train), 0.0
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size].tolist()
            logits = reader.logits(reader.model.pad([rows[i] for i in batch]))
            loss = binary_cross_entropy_with_logits(logits, targets_on_device[batch])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item() * len(batch)

        say(f"epoch {epoch + 1}/{epochs}: cross-entropy {total / len(order):.4f}")

    model.eval().requires_grad_(False)


def _measure_truth(
    table: ScoreTable, indices: np.ndarray, student: np.ndarray, teacher: np.ndarray
) -> dict[str, dict[str, float]]:
    """Return metrics of student and teacher against known labels, as `DistilReport.truth`; empty without labels.

    Args:
        indices: [responses, 2] problem and response in the table of each held-out response.
        student: [responses] probabilities by the distilled model.
        teacher: [responses] probabilities by the ensemble.
    """
    held_out = tuple(indices.T)
    if table.labels is None or np.isnan(table.labels[held_out]).all():
        return {}
    # Arrays of the shape of the table: selection needs whole problems.
    labels, distilled, ensemble = np.full((3, *table.present.shape), np.nan)
    labels[held_out], distilled[held_out], ensemble[held_out] = table.labels[held_out], student, teacher
    return {
        name: {"auc": auc(p, labels), "selection": selection_accuracy(p, labels), "ece": ece(p, labels)}
        for name, p in (("distilled", distilled), ("ensemble", ensemble))
    }
