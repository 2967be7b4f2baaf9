"""Combine weak verifiers into one, without labels or with a few."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

if find_spec("scipy") is None or find_spec("sklearn") is None:
    raise ImportError("forge_weaver needs scipy and scikit-learn: pip install scipy scikit-learn")

# Imported on first use, from these modules: the libraries above take seconds, which `forge --help` need not wait.
_HOMES = {
    **dict.fromkeys(("Aggregator", "FitReport", "load"), "aggregator"),
    "AnchoredLogistic": "anchored",
    **dict.fromkeys(("METHODS", "Auto", "check_one_right", "fit_table", "make"), "auto"),
    **dict.fromkeys(("BinnedDawidSkene", "DawidSkene", "Online"), "binned"),
    "CorrelatedMixture": "correlated",
    **dict.fromkeys(("CalibratedMean", "NaiveMean", "RankMean"), "means"),
    **dict.fromkeys(("Problem", "read_problems", "score_table", "write_problems"), "problems"),
    "PublishedWeaver": "published",
    **dict.fromkeys(("ScoreTable", "families_by_name"), "table"),
    **dict.fromkeys(("Distilled", "Ensemble", "load_ensemble", "save_ensemble"), "verifiers"),
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
