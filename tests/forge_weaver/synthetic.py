"""Synthetic score tables with known truth."""

import dataclasses

import numpy as np
from scipy.special import ndtr, ndtri

from forge_weaver import ScoreTable


@dataclasses.dataclass
class Truth:
    """A table with the parameters that it was drawn from.

    Args:
        table: with all labels.
        tpr, tnr: [verifiers] rates of the verdicts; NaN for scores.
        groups: [verifiers] index of the group that shares noise.
    """

    table: ScoreTable
    tpr: np.ndarray
    tnr: np.ndarray
    groups: np.ndarray


def generate(
    problems: int = 300,
    responses: int = 32,
    verifiers: int = 24,
    *,
    balance: float = 0.3,
    correlation: float = 0.0,
    query_shift: float = 0.0,
    missing: float = 0.0,
    bad: float = 0.0,
    areas: tuple[float, float] = (0.55, 0.85),
    verdicts: bool = False,
    seed: int = 0,
) -> Truth:
    """Latent Gaussian verifiers; a third give verdicts, the others scores on different scales.

    A problem's rate of right responses is Beta distributed around `balance`; its wrong responses favour one answer.

    Args:
        correlation: of the noise within each of four groups of verifiers; half of the verifiers also prefer the popular
            wrong answer in proportion.
        query_shift: standard deviation of a verifier's shift per problem, half of it shared by its group.
        missing: fraction of missing scores; a third as much again is missing for whole problems of a verifier.
        bad: fraction of verifiers below chance.
        areas: range of the verifiers' AUC.
        verdicts: all verifiers give 0 or 1.
    """
    rng = np.random.default_rng(seed)
    shape = (problems, responses)
    # Problems differ in their rate of right responses, and in how attractive one wrong answer is.
    rate = rng.beta(1.5 * balance, 1.5 * (1 - balance), problems)
    right = rng.random(shape) < rate[:, None]
    attraction = rng.beta(2, 2, problems)
    wrong = np.where(rng.random(shape) < attraction[:, None], 1, rng.integers(2, 10, shape))
    answers = np.where(right, 0, wrong)

    # Gaussian verifiers: the distance between the classes follows from the area under the curve.
    area = rng.uniform(*areas, verifiers)
    spoilt = rng.permutation(verifiers)[: round(bad * verifiers)]
    area[spoilt] = rng.uniform(0.40, 0.5, len(spoilt))
    distance = np.sqrt(2) * ndtri(area)
    groups = rng.integers(0, 4, verifiers)
    shared = rng.normal(size=(*shape, 4))[..., groups]
    noise = np.sqrt(1 - correlation) * rng.normal(size=(*shape, verifiers)) + np.sqrt(correlation) * shared
    latent = distance * right[..., None] + noise
    # A problem may shift all scores of a verifier, in part together with its group.
    shift = rng.normal(size=(problems, 1, verifiers)) + rng.normal(size=(problems, 1, 4))[..., groups]
    latent += query_shift * 0.7 * shift
    deceived = rng.random(verifiers) < 0.5
    latent += 0.8 * correlation * (answers == 1)[..., None] * np.abs(distance) * deceived

    # A third are judges, who accept or reject; the others score on a scale of one of four shapes.
    cuts = rng.normal(0.3, 0.8, verifiers)
    judges = np.ones(verifiers, bool) if verdicts else np.isin(np.arange(verifiers), rng.permutation(verifiers)[::3])
    scores = np.empty_like(latent)
    for v in range(verifiers):
        z = latent[..., v]
        if judges[v]:
            scores[..., v] = z > cuts[v]
        else:
            curves = (z * rng.uniform(0.3, 8) + 5 * rng.normal(), 1 / (1 + np.exp(-1.5 * z - 1)), np.exp(0.8 * z))
            scores[..., v] = (*curves, 3 * np.tanh(z / 2))[rng.integers(4)]
    # Single scores are missing, and whole problems of a verifier.
    if missing:
        is_missing = (rng.random(latent.shape) < missing) | (rng.random((problems, 1, verifiers)) < missing / 3)
        scores[is_missing] = np.nan
    table = ScoreTable(
        scores,
        tuple(f"{'judge' if judges[v] else 'model'}_{v}" for v in range(verifiers)),
        labels=right.astype(float),
        answers=[[str(answer) for answer in row] for row in answers],
    )
    tpr = ndtr(distance - cuts)
    tnr = ndtr(cuts)
    return Truth(table, np.where(judges, tpr, np.nan), np.where(judges, tnr, np.nan), groups)


def scenario(name: str, seed: int = 0, problems: int = 300, responses: int = 32, verifiers: int = 24) -> Truth:
    if name not in SCENARIOS:
        raise ValueError(f"no scenario {name!r}: there are {', '.join(SCENARIOS)}")
    return generate(problems, responses, verifiers, seed=seed, areas=(0.52, 0.76), **SCENARIOS[name])  # type: ignore[arg-type]


SCENARIOS: dict[str, dict[str, float]] = {
    "independent": {},
    "missing": {"missing": 0.2},
    "correlated": {"correlation": 0.5},
    "hard": {"correlation": 0.5, "query_shift": 0.5, "missing": 0.2, "bad": 0.2},
}
