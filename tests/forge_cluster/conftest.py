"""Machines out of namespaces, with a worker on all but the first."""

import sys
from collections.abc import Iterator

import pytest

from tests.forge_cluster.machines import ROOT, Machines, listens, missing, wait_until


@pytest.fixture(scope="session")
def machines_missing() -> str | None:
    return missing()


@pytest.fixture
def lab(request, machines_missing, tmp_path) -> Iterator[Machines]:
    """Three machines, or as many as the test's parameter says; they share its temporary folder."""
    if machines_missing:
        pytest.skip(machines_missing)
    with Machines(getattr(request, "param", 3), shared=[ROOT, sys.prefix, tmp_path]) as machines:
        for machine in machines[1:]:
            machine.work()
        wait_until(lambda: all(listens(machine) for machine in machines[1:]), 60, "workers listen")
        yield machines
