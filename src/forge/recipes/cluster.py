"""The configuration section of the machines of a run."""

from __future__ import annotations

import os

from pydantic import NonNegativeFloat

from ..config.sections import Section
from ..runtime.names import HOSTS


class ClusterConfig(Section):
    """Other machines, each with a `forge worker` ([clusters.md](clusters.md)). Services with `hosts` or `with_gpus` are
    placed there."""

    hosts: list[str] | str | None = None
    """HOST:PORT of each worker, or the path of a file with one a line, or of the folder that workers register in; null:
    FORGE_HOSTS, which launchers set; without it this machine is the only one."""
    wait: NonNegativeFloat = 600.0
    """Seconds that a service without any replica waits for a host; services with others continue with those."""

    @property
    def configured_hosts(self) -> list[str] | str | None:
        """The hosts of this run, if any."""
        return self.hosts or os.environ.get(HOSTS) or None
