"""Checks of the section `metrics` before a run: packages, and the login of W&B."""

from __future__ import annotations

import importlib.util
import os

from forge.config.plugin import resolve
from forge.observability.lines import Row

# In the order of their documentation; each is a section of `metrics`.
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
PACKAGES = {"mlflow": "mlflow-skinny"}  # where the package has another name than its module


def check_trackers(metrics: Row) -> None:
    """Check the section `metrics` of a configuration.

    Raises:
        ModuleNotFoundError: a package is missing; names it.
        ValueError: W&B has no API key here, WANDB_MODE is none of its modes, or there is no tracker of your own's name.
    """
    if metrics.get("tracker"):
        resolve(metrics["tracker"], "metrics.tracker")
    needs: dict[str, list[str]] = {name: [name] for name in TRACKERS if metrics.get(name)}
    # MLflow's light package has no database driver, which a server on another machine does not need.
    if "mlflow" in needs:
        address = metrics["mlflow"]["tracking_uri"] or os.environ.get("MLFLOW_TRACKING_URI", "sqlite:")
        database = address.startswith(("sqlite:", "postgresql", "mysql", "mssql"))
        needs["mlflow"] += ["pandas", *(("sqlalchemy", "alembic") if database else ())]
    for name, modules in needs.items():
        missing = [PACKAGES.get(module, module) for module in modules if importlib.util.find_spec(module) is None]
        if missing:
            raise ModuleNotFoundError(
                f"metrics.{name} needs the {', '.join(missing)} package{'s' * (len(missing) > 1)}: "
                f"pip install {' '.join(missing)}"
            )
    if "wandb" in needs and wandb_mode(metrics["wandb"]) == "online":
        import wandb

        if not wandb.api.api_key:
            raise ValueError(
                "metrics.wandb: there is no API key: run wandb login, set WANDB_API_KEY, or set mode: offline"
            )


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
