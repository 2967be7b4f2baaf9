"""The section `episode.agent.collection` of a recipe."""

from __future__ import annotations

import shutil
from typing import Any, Literal

from pydantic import Field, PositiveFloat

from forge.config import ConfigError
from forge.config.sections import Section

WORKERS = {"verifiers": "verifiers_worker.py"}  # in the folder of `forge_agents.workers`


class CollectionConfig(Section):
    """An environment of a collection, which plays and scores the episodes."""

    kind: Literal["verifiers"]
    """`verifiers` 0.4, in a Python environment of its package."""
    environment: str
    """The id of a taskset."""
    python: str
    """The Python that has the package: `ENVIRONMENT/bin/python`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the environment, in the package's words."""
    scoring_timeout: PositiveFloat = 120.0
    """Seconds that an episode may take beyond `episode.agent.timeout`, for its scores."""

    def _check(self) -> None:
        # A name is looked up as a shell does; a path must be one of a program.
        if shutil.which(self.python) is None:
            raise ConfigError(
                f"episode.agent.collection.python {self.python} is not a program: make the environment "
                "(docs/collections.md), and name its bin/python"
            )
