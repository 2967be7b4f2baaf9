"""The section `episode.agent.collection` of a recipe."""

from __future__ import annotations

import shutil
from typing import Any, Literal

from pydantic import Field, PositiveFloat

from forge.config import ConfigError
from forge.config.sections import Section

WORKERS = {"verifiers": "verifiers_worker.py", "nemo": "nemo_worker.py"}  # in the folder of `forge_agents.workers`


class CollectionConfig(Section):
    """An environment of a collection, which plays and scores the episodes."""

    kind: Literal["verifiers", "nemo", "harbor"]
    """`verifiers` 0.4 or `nemo-gym` 0.4, each in a Python environment of its package, or task folders of Harbor."""
    environment: str
    """The id of a taskset of verifiers; a resources server of NeMo Gym or a YAML file of one; a folder of tasks."""
    python: str | None = None
    """The Python that has the package: `ENVIRONMENT/bin/python`. Not of `harbor`, which needs none."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the environment, in the package's words."""
    scoring_timeout: PositiveFloat = 120.0
    """Seconds that an episode may take beyond `episode.agent.timeout`, for its scores."""

    def _check(self) -> None:
        if self.kind in WORKERS:
            if self.python is None:
                raise ConfigError(f"episode.agent.collection.python must name the Python that has {self.kind}")
            # A name is looked up as a shell does; a path must be one of a program.
            if shutil.which(self.python) is None:
                raise ConfigError(
                    f"episode.agent.collection.python {self.python} is not a program: make the environment "
                    "(docs/collections.md), and name its bin/python"
                )
        elif self.python is not None:
            raise ConfigError(f"episode.agent.collection.python does nothing: {self.kind} needs no other Python")
