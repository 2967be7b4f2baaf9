"""Losses by the names of the torchforge documents. They live in `forge.algorithms`, one file each."""

from .. import algorithms
from ..algorithms import (
    ALGORITHMS,
    Algorithm,
    BradleyTerryLoss,
    Correction,
    DPOLoss,
    SFTLoss,
    SimpleGRPOLoss,
    ValueLoss,
    gae,
    load_algorithm,
)

PolicyLoss = Algorithm
GRPOLoss = algorithms.GRPO
DrGRPOLoss = algorithms.DrGRPO
DAPOLoss = algorithms.DAPO
GSPOLoss = algorithms.GSPO
CISPOLoss = algorithms.CISPO
SAPOLoss = algorithms.SAPO
RLOOLoss = algorithms.RLOO
ReinforceLoss = algorithms.Reinforce
ReinforcePlusPlusLoss = algorithms.ReinforcePlusPlus
PPOLoss = algorithms.PPO
DecoupledPPOLoss = algorithms.DecoupledPPO
DistillLoss = algorithms.Distill

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "BradleyTerryLoss",
    "CISPOLoss",
    "Correction",
    "DAPOLoss",
    "DPOLoss",
    "DecoupledPPOLoss",
    "DistillLoss",
    "DrGRPOLoss",
    "GRPOLoss",
    "GSPOLoss",
    "PPOLoss",
    "PolicyLoss",
    "RLOOLoss",
    "ReinforceLoss",
    "ReinforcePlusPlusLoss",
    "SAPOLoss",
    "SFTLoss",
    "SimpleGRPOLoss",
    "ValueLoss",
    "gae",
    "load_algorithm",
]
