"""Many weak verifiers made into one good one, without labels or with a handful."""

from .aggregator import Aggregator, load
from .anchored import AnchoredLogistic
from .auto import Auto
from .binned import BinnedDawidSkene
from .correlated import CorrelatedMixture
from .dawid_skene import DawidSkene
from .fit_report import FitReport
from .majority import Majority
from .methods import METHODS, check_one_right, fit_table, make
from .naive_mean import NaiveMean
from .online import Online
from .problems import Problem, read_problems, score_table, write_problems
from .published import PublishedWeaver
from .rank_mean import RankMean
from .report import write_report
from .table import ScoreTable, families_by_name
from .triplets import MedianTriplets
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
    "Majority",
    "MedianTriplets",
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
    "write_report",
]
