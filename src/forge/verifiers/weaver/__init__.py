"""Many weak verifiers made into one good one, without labels or with a handful."""

from .aggregator import Aggregator, load
from .anchored import AnchoredLogistic
from .auto import Auto
from .binned import BinnedDawidSkene
from .correlated import CorrelatedMixture
from .dawid_skene import DawidSkene
from .ensemble import EnsembleConfig, load_ensemble, save_ensemble
from .fit_report import FitReport
from .majority import Majority
from .methods import METHODS, check_one_right, make
from .naive_mean import NaiveMean
from .online import Online
from .published import PublishedWeaver
from .rank_mean import RankMean
from .report import write_report
from .table import ScoreTable, families_by_name
from .triplets import MedianTriplets

__all__ = [
    "METHODS",
    "Aggregator",
    "AnchoredLogistic",
    "Auto",
    "BinnedDawidSkene",
    "CorrelatedMixture",
    "DawidSkene",
    "EnsembleConfig",
    "FitReport",
    "Majority",
    "MedianTriplets",
    "NaiveMean",
    "Online",
    "PublishedWeaver",
    "RankMean",
    "ScoreTable",
    "check_one_right",
    "families_by_name",
    "load",
    "load_ensemble",
    "make",
    "save_ensemble",
    "write_report",
]
