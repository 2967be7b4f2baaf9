"""Limits of all processes together, capabilities, and what programs see of the machine."""

import asyncio
import os
import subprocess
import sys

import pytest

from .conftest import CASES, opened
from .test_sandbox import each_level, run

pytestmark = pytest.mark.processes


@pytest.fixture
def sandbox(level, user, sandboxes):
    return sandboxes(level, user)


@pytest.mark.parametrize(("level", "user"), CASES)
def test_cpu_limit_of_sandbox_counts_unreaped_children(level, user):
    """Their time would be counted nowhere if the program could ignore their end, and they are too short to be seen."""
    program = """
        import ctypes, os, signal, time
        libc = ctypes.CDLL(None)
        action = (ctypes.c_long * 20)(0, 2 | 0x4000000)  # SA_NOCLDWAIT
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            print("ignored")
        except PermissionError:
            pass
        if libc.sigaction(17, action, None) == 0:
            print("ignored")
        while True:
            if not os.fork():
                until = time.process_time() + 0.01
                while time.process_time() < until:
                    pass
                os._exit(0)
            try:
                while os.waitpid(-1, 0)[0]:
                    pass
            except ChildProcessError:
                pass
    """
    sandbox = opened(level, user, workers=1, cpu_seconds=1)
    result = run(sandbox, program, time_limit=200.0)
    assert (result.status, result.stdout) == ("timeout", "")
    assert 1.0 <= result.cpu_seconds < result.seconds * os.cpu_count() < 200.0
    asyncio.run(sandbox.close())


@each_level
def test_sandboxed_program_has_no_capabilities(sandbox, level, user):
    bounds = "import ctypes\nprint(sum(ctypes.CDLL(None).prctl(23, n, 0, 0, 0) > 0 for n in range(64)))"
    assert run(sandbox, bounds).stdout == "0\n"
    sets = "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('Cap')])"
    assert run(sandbox, sets).stdout == f"{['0' * 16] * 5}\n"


@each_level
def test_sandboxed_program_cannot_read_kernel_and_cgroup_details(sandbox, level, user):
    for path in ("/proc/cmdline", "/proc/version", "/proc/keys"):
        assert "Error" in run(sandbox, f"open({path!r}).read()").stderr
    assert run(sandbox, "print({line.split(':')[2] for line in open('/proc/self/cgroup')})").stdout == "{'/\\n'}\n"


@pytest.mark.full
def test_sandbox_limits_hold_where_proc_is_masked():
    """As in containers, which mount something over parts of it: programs have no /proc then."""
    if os.geteuid():
        pytest.skip("takes root")
    script = f"""
import asyncio, ctypes, os, sys
sys.path[:0] = {sys.path!r}
from forge_sandbox import Sandbox
libc = ctypes.CDLL(None)
assert libc.unshare(0x20000) == 0 and libc.mount(None, b"/", None, 16384 | 1 << 18, None) == 0
assert libc.mount(b"none", b"/proc/fs", b"tmpfs", 0, None) == 0
burn = "import os\\nfor _ in range(3): os.fork()\\nwhile True: pass"
hold = "import os, time\\nfor _ in range(4):\\n if not os.fork(): break\\nx = b'x' * (100 << 20)\\ntime.sleep(60)"
async def main():
    async with Sandbox("namespaces", cpu_seconds=1, memory_mb=256) as sandbox:
        print((await sandbox.run("import os; print(os.listdir('/proc'))")).stdout.strip())
        for program in (burn, hold):
            print((await sandbox.run(program, time_limit=100.0)).status)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["[]", "timeout", "memory"], done.stderr
