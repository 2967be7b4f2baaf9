"""Combine weak verifiers into one, without labels or with a few."""

try:
    import scipy as _scipy  # noqa: F401
    import sklearn as _sklearn  # noqa: F401
except ImportError as error:
    raise ImportError("forge_weaver needs scipy and scikit-learn: pip install scipy scikit-learn") from error

from .aggregator import Aggregator, FitReport, load
from .anchored import AnchoredLogistic
from .auto import METHODS, Auto, check_one_right, fit_table, make
from .binned import BinnedDawidSkene, DawidSkene, Online
from .correlated import CorrelatedMixture
from .means import NaiveMean, RankMean
from .problems import Problem, read_problems, score_table, write_problems
from .published import PublishedWeaver
from .table import ScoreTable, families_by_name
from .verifiers import Distilled, Ensemble, load_ensemble, save_ensemble

__all__ = [
    "METHODS",
    "Aggregator",
    "AnchoredLogistic",
    "Auto",
    "BinnedDawidSkene",
    "CorrelatedMixture",
    "DawidSkene",
    "Distilled",
    "Ensemble",
    "FitReport",
    "NaiveMean",
    "Online",
    "Problem",
    "PublishedWeaver",
    "RankMean",
    "ScoreTable",
    "check_one_right",
    "families_by_name",
    "fit_table",
    "load",
    "load_ensemble",
    "make",
    "read_problems",
    "save_ensemble",
    "score_table",
    "write_problems",
]
