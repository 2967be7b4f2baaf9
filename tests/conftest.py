"""One thread a process, components defined in tests importable in the processes that tests start. Only tests that are
marked `processes`, or whose fixtures ask for the fixture of this name, may start any."""

import logging
import multiprocessing.util
import os
import platform
import sys
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import settings

from forge.observability.console import configure_logging
from forge.observability.metrics import drain
from forge.runtime.controller import forked_processes
from forge.runtime.controller._monarch import HostMesh

ROOT = Path(__file__).parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
sys.path.insert(0, str(ROOT))
# Autograd counts the kinds of devices at its first backward pass, which some tests make as they are collected.
import_module("tests.emulated")
configure_logging()
logging.getLogger("forge").propagate = True  # to caplog, which listens at the root

# One a tier of the Makefile, chosen by --hypothesis-profile.
settings.register_profile("check", deadline=None, max_examples=10, derandomize=True)
settings.register_profile("test", deadline=None, max_examples=50)
settings.register_profile("all", deadline=None, max_examples=60)
settings.register_profile("long", deadline=None, max_examples=5000)  # for tests/data/test_fuzz.py, by hand
settings.load_profile("test")

STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec", "forge.spawn"}
_unit: pytest.Item | None = None  # the test that runs and may start no process
_started: list[str] = []  # its errors: what catches one does not hide it


def _forbid(event: str, args: tuple) -> None:
    if _unit is not None and event in STARTS:
        _started.append(f"{_unit.nodeid} starts a process, but is not marked `processes`: {event}{args[:2]}")
        raise RuntimeError(_started[-1])


def _audited(start):
    """A way to start processes that Python has no audit event for."""

    def audited(*args, **kwargs):
        sys.audit("forge.spawn", *args, *kwargs.values())
        return start(*args, **kwargs)

    return audited


platform.processor()  # asks `uname` once, as openai would in the middle of a test
sys.addaudithook(_forbid)
multiprocessing.util.spawnv_passfds = _audited(multiprocessing.util.spawnv_passfds)
HostMesh.spawn_procs = _audited(HostMesh.spawn_procs)


def _guarded(item):
    global _unit
    _unit = None if item.get_closest_marker("processes") else item
    try:
        return (yield)
    finally:
        _unit = None
        if _started:
            message, _started[:] = _started[0], []
            pytest.fail(message, pytrace=False)


pytest_runtest_setup = pytest_runtest_call = pytest.hookimpl(wrapper=True)(_guarded)


@pytest.fixture(scope="session")
def processes():
    """For fixtures that start processes: it marks the tests that use them."""


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
        if "processes" in item.fixturenames:
            item.add_marker("processes")
        if item.get_closest_marker("processes") and path.parent.name == "recipes":
            item.fixturenames.insert(0, "fork_server")


@pytest.fixture(scope="session")
def fork_server(processes):
    """The server that forks the processes of all runs within this process: each has 5 s of CPU time to import."""
    with forked_processes():
        yield


@pytest.fixture(autouse=True)
def own_metrics():
    """Components that a test runs in this process leave no metrics to the next test."""
    drain()
