"""Checks of the section `metrics` before a run: packages, and the login of W&B."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

from ...system.masking import masked_names
from ..lines import Row

# In the order of their documentation; each is a section of `metrics`.
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
LOGIN = """
import sys, wandb
try:
    wandb.login(verify=False)
except wandb.errors.UsageError:
    sys.exit(1)
"""


def check_trackers(metrics: Row) -> None:
    """Check the section `metrics` of a configuration.

    Raises:
        ModuleNotFoundError: a package is missing; names it.
        ValueError: W&B has no API key here, or WANDB_MODE is none of its modes.
    """
    needs: dict[str, list[str]] = {name: [name] for name in TRACKERS if metrics.get(name)}
    # MLflow's light package has no database driver, which a server on another machine does not need.
    if "mlflow" in needs:
        address = metrics["mlflow"]["tracking_uri"] or os.environ.get("MLFLOW_TRACKING_URI", "sqlite:")
        database = address.startswith(("sqlite:", "postgresql", "mysql", "mssql"))
        needs["mlflow"] += ["pandas", *(("sqlalchemy", "alembic") if database else ())]
    for name, modules in needs.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        if missing:
            packages = [{"mlflow": "mlflow-skinny"}.get(module, module) for module in missing]
            raise ModuleNotFoundError(
                f"metrics.{name} needs the {', '.join(missing)} package{'s' * (len(missing) > 1)}: "
                f"pip install {' '.join(packages)}"
            )
    # In another process, because of W&B's threads; on a terminal it asks for the key.
    login = [sys.executable, "-c", LOGIN]
    online = "wandb" in needs and wandb_mode(metrics["wandb"]) == "online"
    if online and subprocess.run(login, stdout=subprocess.DEVNULL).returncode:
        raise ValueError("metrics.wandb: there is no API key: run wandb login, set WANDB_API_KEY, or set mode: offline")


def wandb_mode(section: Row) -> str:
    """Return whether W&B is online, offline or disabled, from the section or else from WANDB_MODE.

    Raises:
        ValueError: WANDB_MODE is none of W&B's modes.
    """
    variable = os.environ.get("WANDB_MODE", "").strip().lower() or "online"
    mode = section["mode"] or {"dryrun": "offline", "shared": "online", "run": "online"}.get(variable, variable)
    if mode not in ("online", "offline", "disabled"):
        raise ValueError(
            f"WANDB_MODE is {variable!r}: set it to online, offline or disabled, or set metrics.wandb.mode"
        )
    return mode


def metrics_after_run(metrics: Row) -> Row:
    """Return the section of a run that has ended, with MLflow's address from the environment if its password is masked.

    Raises:
        ValueError: the environment does not have it.
    """
    section = metrics.get("mlflow")
    if not section or not any(masked_names(section)):
        return metrics
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        raise ValueError("the password in metrics.mlflow.tracking_uri was not kept: set MLFLOW_TRACKING_URI to it")
    return metrics | {"mlflow": section | {"tracking_uri": None}}
