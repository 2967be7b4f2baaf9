"""One thread a process, and components defined in tests importable in the processes that tests start."""

import logging
import os
import sys
from pathlib import Path

import pytest

from forge.observability.console import configure_logging
from forge.observability.metrics import drain

ROOT = Path(__file__).parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
sys.path.insert(0, str(ROOT))
configure_logging()
logging.getLogger("forge").propagate = True  # to caplog, which listens at the root


@pytest.hookimpl(tryfirst=True)  # before xdist, which looks for the groups in its own
def pytest_collection_modifyitems(items):
    """What two workers may take: a file each, or all of a folder whose fixtures are whole runs and engines, or whose
    programs attack whatever their user runs."""
    long = ("training", "apps", "controller")  # first, not to be waited for at the end
    items.sort(key=lambda item: item.path.parent.name not in long)
    for item in items:
        path = item.path.relative_to(ROOT / "tests")
        together = path.parent.name in ("training", "conformance", "sandbox")
        item.add_marker(pytest.mark.xdist_group(str(path.parent if together else path)))


@pytest.fixture(autouse=True)
def own_metrics():
    """Components that a test runs in this process leave no metrics to the next test."""
    drain()
