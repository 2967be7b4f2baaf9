"""Set up tests: one thread a process, hypothesis profiles of the tiers, and a guard against unmarked processes.

The guard: a test may start processes only if it is marked `processes`, or one of its fixtures asks for the fixture
`processes`. `make check` skips those, so that it stays fast. An audit hook sees each start, and fails the test that
runs. To mark a whole file: `pytestmark = pytest.mark.processes`.

Groups: xdist gives each worker whole files, so that module fixtures run once; directories in TOGETHER share session
fixtures, and go to one worker.
"""

import inspect
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
# Some images switch bytecode files off: each of some hundred processes would compile the library again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
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

# Audit events of new processes; "forge.spawn" is for calls without an event.
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec", "forge.spawn"}
_unit_test: pytest.Item | None = None  # the running test, if it may start no process
_violations: list[str] = []  # kept: a test that catches the error fails all the same

# Directories with long tests start first, so that nobody waits for them at the end.
LONG = ("training", "recipes", "runtime/controller", "runtime/monarch", "forge_cluster", ".")  # .: benchmarks, pages
# Directories whose fixtures are whole runs and engines, or whose programs attack whatever their user runs.
TOGETHER = ("training", "engines/conformance", "forge_sandbox")
# Directories whose tests start components that import PyTorch and transformers: their processes are forked.
FORKED = (
    *("recipes", "actors", "forge_agents", "forge_agents/serving", "forge_compat", "forge_families", "forge_inspect"),
    *("models", "seeds", "system"),
)
for directory in (*LONG, *TOGETHER, *FORKED):
    # An extension that is removed takes its tests along.
    is_removed = directory.startswith("forge_") and not (ROOT / "src" / directory).is_dir()
    if not is_removed and not (ROOT / "tests" / directory).is_dir():
        raise RuntimeError(f"tests/conftest.py names tests/{directory}, which does not exist: name its new place")


def _forbid_start(event: str, args: tuple) -> None:
    if _unit_test is not None and event in STARTS:
        _violations.append(f"{_unit_test.nodeid} starts a process, but is not marked `processes`: {event}{args[:2]}")
        raise RuntimeError(_violations[-1])


def _with_audit_event(start):
    """Return a function that starts processes with an audit event, which Python does not have for it."""

    def audited(*args, **kwargs):
        sys.audit("forge.spawn", *args, *kwargs.values())
        return start(*args, **kwargs)

    return audited


def pytest_xdist_auto_num_workers(config):
    """Return the number of workers where `-n` names none: a file runs in this process, directories by three."""
    return 0 if all(".py" in argument for argument in config.args) else 3


def pytest_configure(config):
    """Install the guard; run a test that is named whatever its tier."""
    if any("::" in argument for argument in config.args):
        config.option.markexpr = ""
    platform.processor()  # asks `uname` once, which openai would do in the middle of a test
    sys.addaudithook(_forbid_start)
    multiprocessing.util.spawnv_passfds = _with_audit_event(multiprocessing.util.spawnv_passfds)
    HostMesh.spawn_procs = _with_audit_event(HostMesh.spawn_procs)


def _guard_test(item):
    global _unit_test
    _unit_test = None if item.get_closest_marker("processes") else item
    try:
        return (yield)
    finally:
        _unit_test = None
        if _violations:
            message = _violations[0]
            _violations.clear()
            pytest.fail(message, pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """Guard the fixtures of a test."""
    return (yield from _guard_test(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Guard a test."""
    return (yield from _guard_test(item))


@pytest.fixture(scope="session")
def processes():
    """For fixtures that start processes: it marks the tests that use them."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is a coroutine: as a controller's program if it starts processes, else by asyncio."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    if pyfuncitem.get_closest_marker("processes"):
        from forge.runtime.controller import run
    else:
        from asyncio import run
    run(pyfuncitem.obj(**arguments))
    return True


@pytest.hookimpl(tryfirst=True)  # before xdist, which looks for the groups in its own
def pytest_collection_modifyitems(items):
    """Order tests, give them their xdist groups, and mark those whose fixtures start processes."""

    def directory_of(item):
        return item.path.parent.relative_to(ROOT / "tests").as_posix()

    items.sort(key=lambda item: directory_of(item) not in LONG)
    for item in items:
        directory = directory_of(item)
        group = directory if directory in TOGETHER else item.path.relative_to(ROOT).as_posix()
        item.add_marker(pytest.mark.xdist_group(group))
        if "processes" in item.fixturenames:
            item.add_marker("processes")
        if item.get_closest_marker("processes") and directory in FORKED:
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
