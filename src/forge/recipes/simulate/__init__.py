"""Runs in virtual time: what settings are worth before there is a machine to try them on."""

from .results import SimulatedRun
from .run import simulate
from .settings import SimulationSettings

__all__ = ["SimulatedRun", "SimulationSettings", "simulate"]
