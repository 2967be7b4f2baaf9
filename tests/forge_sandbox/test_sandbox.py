"""What a sandbox answers, at each level; its limits; its failures."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from forge_envs.environment import InfrastructureError
from forge_sandbox import Sandbox, SandboxError

from .conftest import CASES, SELF, opened, python_of, whose

pytestmark = pytest.mark.processes

each_level = pytest.mark.parametrize(("level", "user"), CASES)


@pytest.fixture
def sandbox(level, user, sandboxes):
    return sandboxes(level, user)


def run(sandbox, program, **settings):
    return asyncio.run(sandbox.run(textwrap.dedent(program), **settings))


def below(pid: int) -> set[int]:
    """All processes that a process has started, however far down."""
    found = {pid}
    parents = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pids: set[int], patience: float = 20.0) -> bool:
    until = time.monotonic() + patience
    while (left := any(map(lives, pids))) and time.monotonic() < until:
        time.sleep(0.01)
    return not left


@each_level
def test_sandbox_result_has_status_output_and_exit_code(sandbox, level, user):
    result = run(sandbox, "import sys\nprint(input() + '!')\nprint('noted', file=sys.stderr)", stdin="hällo")
    assert (result.status, result.stdout, result.stderr, result.exit_code) == ("ok", "hällo!\n", "noted\n", 0)
    assert result.seconds > 0
    assert not result.truncated
    result = run(sandbox, "def f():\n    1 / 0\nf()")
    assert (result.status, result.exit_code) == ("error", 1)
    assert result.stderr.startswith(
        'Traceback (most recent call last):\n  File "program.py", line 3, in <module>\n    f()'
    )
    assert "ZeroDivisionError" in result.stderr
    assert (run(sandbox, "exit(3)").exit_code, run(sandbox, "exit(-1)").status) == (3, "error")
    result = run(sandbox, "exit(152)")
    assert (result.status, result.exit_code) == ("error", 152)
    assert run(sandbox, "raise SystemExit('why')").stderr == "why\n"
    assert run(sandbox, "x = (").stderr.startswith('  File "program.py", line 1\n    x = (')
    assert (run(sandbox, "\0").status, run(sandbox, "").status) == ("error", "ok")
    assert run(sandbox, "import os; os.kill(os.getpid(), 11)").status == "killed"
    assert run(sandbox, "import ctypes; ctypes.string_at(0)").exit_code == -signal.SIGSEGV


@each_level
def test_each_sandboxed_program_runs_in_fresh_process(sandbox, level, user):
    program = "import os, random, sys\nsys.leak = getattr(sys, 'leak', 0) + 1\n"
    program += "print(sys.leak, random.random(), {**os.environ})"
    first, second = (run(sandbox, program).stdout.split(" ", 2) for _ in range(2))
    assert first[0] == second[0] == "1"
    assert first[1] != second[1]
    assert first[2] == "{'HOME': '/tmp', 'LANG': 'C.UTF-8', 'PATH': '/usr/bin:/bin'}\n"


@each_level
def test_sandbox_memory_of_earlier_program_is_not_readable(sandbox, level, user):
    """Answers of others are worth money: not even their text may be found."""
    run(sandbox, "print('needle' * 3)", stdin="needle" * 3)
    search = """
        import ctypes, re
        found = 0
        for line in open("/proc/self/maps"):
            start, end = (int(x, 16) for x in line.split()[0].split("-"))
            if "rw" in line and "vv" not in line:
                found += ctypes.string_at(start, end - start).count(("need" + "le").encode() * 3)
        print(found)
    """
    result = run(sandbox, search)
    assert result.stdout == "0\n", result.stderr


@each_level
def test_sandbox_time_memory_and_output_limits_end_programs(sandbox, level, user):
    result = run(sandbox, "import time\nprint('begun', flush=True)\ntime.sleep(60)", time_limit=1.0)
    assert (result.status, result.stdout) == ("timeout", "begun\n")
    deaf = """
        import signal
        for number in range(1, 65):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        while True:
            pass
    """
    assert run(sandbox, deaf, time_limit=0.2).status == "timeout"
    assert run(sandbox, "x = bytearray(10 << 30)").status == "memory"
    assert run(sandbox, "x = 'x' * (1 << 33)").status == "memory"
    result = run(sandbox, "import os\nwhile True: os.write(1, b'x' * 1000)")
    assert (result.status, len(result.stdout), result.truncated) == ("output", 64 << 10, True)
    result = run(sandbox, "import sys\nsys.stderr.write('x' * 10 ** 7)")
    assert (result.status, len(result.stderr)) == ("output", 64 << 10)
    assert run(sandbox, "print('x' * ((64 << 10) - 1))").status == "ok"
    # The stack of C overflows in glibc's parser of regular expressions; Python's own calls it may stop in time.
    deep = "import ctypes\nctypes.CDLL(None).regcomp(ctypes.create_string_buffer(1 << 10), b'(' * 10 ** 6, 1)"
    assert run(sandbox, deep).status in ("killed", "error", "memory")
    assert run(sandbox, "def f(): f()\nf()").status == "error"


def test_sandbox_cpu_limit_counts_forked_children():
    sandbox = opened("namespaces", SELF, workers=1, cpu_seconds=1)
    burn = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
    deaf = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
    for program in (burn, deaf + "while True: pass"):
        result = run(sandbox, program, time_limit=200.0)
        assert result.status == "timeout"
        assert result.seconds < 100
    asyncio.run(sandbox.close())


def test_each_sandboxed_program_has_separate_bounded_files(sandboxes):
    sandbox = sandboxes("namespaces", SELF)
    program = "import os, tempfile\nprint(os.listdir('/tmp'))\nos.write(tempfile.mkstemp()[0], b'x')"
    assert [run(sandbox, program).stdout for _ in range(2)] == ["[]\n", "[]\n"]
    program = "for name in 'ab':\n with open(name, 'wb', 0) as f:\n  for n in range(12): f.write(bytes(1 << 20))"
    assert "No space left" in run(sandbox, program).stderr
    assert "File too large" in run(sandbox, "open('x', 'wb').truncate(1 << 30)").stderr


def test_preloaded_user_modules_are_importable_in_sandbox(tmp_path):
    folder = Path("/tmp") / f"forge-modules-{os.getpid()}"
    folder.mkdir()
    (folder / "mine.py").write_text("import os\nvalue = 'mine'\n")
    (folder / "data").write_text("read")
    try:
        sandbox = opened("namespaces", SELF, workers=1, imports=["mine"], path=[str(folder)])
        program = f"import mine, sys\nprint(mine.value, open('{folder}/data').read(), 'inside' in sys.modules)"
        assert run(sandbox, program).stdout == "mine read False\n"
        asyncio.run(sandbox.close())
        with pytest.raises(SandboxError, match="No module named 'yours'"):
            opened("namespaces", SELF, imports=["yours"])
        with pytest.raises(SandboxError, match="/nowhere"):
            opened("namespaces", SELF, readable=["/nowhere"])
    finally:
        for path in folder.rglob("*.py*"):
            path.unlink(missing_ok=True)
        subprocess.run(["rm", "-r", str(folder)], check=True)


def test_cancelled_sandbox_caller_does_not_end_other_programs():
    sandbox = opened("namespaces", SELF, workers=1)

    async def main():
        await sandbox.run("1")
        over = asyncio.create_task(sandbox.run("1"))
        other = asyncio.create_task(sandbox.run("import time; time.sleep(0.5); print(2)"))
        await asyncio.sleep(0)
        time.sleep(0.25)  # noqa: ASYNC251 - the loop is not to hear that the first is over
        over.cancel()
        assert (await other).stdout == "2\n"
        await sandbox.close()

    asyncio.run(main())


def test_invalid_sandbox_settings_raise():
    for settings, what in (
        ({"level": "jail"}, "level must be"),
        ({"level": "none"}, "allow_unsafe"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"memory_mb": 0, "output_kb": -1}, "memory_mb, output_kb must be"),
        ({"cpu_seconds": 1.5}, "cpu_seconds must be .* whole"),
        ({"readable": ["/tmp/"]}, "programs have their own /tmp"),
        ({"path": ["/"]}, "programs have their own /tmp"),
    ):
        with pytest.raises(ValueError, match=what):
            Sandbox(**settings)

    async def main():
        sandbox = Sandbox()
        for arguments, what in (
            (("x", "", 0), "time_limit"),
            (("\ud800",), "UTF-8"),
            (("x" * (65 << 20),), "bytes"),
        ):
            with pytest.raises(ValueError, match=what):
                await sandbox.run(*arguments)
        await sandbox.close()
        await sandbox.close()
        with pytest.raises(RuntimeError, match="closed"):
            await sandbox.run("1")

    asyncio.run(main())


def test_unavailable_sandbox_level_error_names_missing_part():
    with pytest.raises(SandboxError) as raised:
        asyncio.run(Sandbox(python="/nowhere/python").start())
    for word in ("namespaces: /nowhere/python could not be started", "user namespaces", "allow_unsafe"):
        assert word in str(raised.value)
    assert isinstance(raised.value, InfrastructureError)


def test_sandbox_level_none_runs_programs_unconfined_and_warns(caplog):
    async def main():
        async with Sandbox("none", allow_unsafe=True) as sandbox:
            assert sandbox.level == "none"
            assert (await sandbox.run("print(len(open('/etc/passwd').read()) > 0)")).stdout == "True\n"

    asyncio.run(main())
    assert "level none" in caplog.text


def test_killed_sandbox_worker_is_replaced_and_program_is_rerun():
    before = below(os.getpid())
    sandbox = opened("namespaces", SELF, workers=1)
    assert run(sandbox, "print(1)").stdout == "1\n"
    for victims in (lambda: below(os.getpid()) - before, lambda: {max(below(os.getpid()) - before)}):

        async def main(victims=victims):
            running = asyncio.create_task(sandbox.run("import time; time.sleep(0.5); print(2)"))
            await asyncio.sleep(0.2)
            for pid in victims() if victims() else ():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            return await running

        assert asyncio.run(main()).status in ("ok", "killed")
    assert run(sandbox, "print(3)").stdout == "3\n"
    everything = below(os.getpid()) - before
    asyncio.run(sandbox.close())
    assert gone(everything)


def test_stopped_sandbox_worker_is_replaced(monkeypatch):
    monkeypatch.setattr("forge_sandbox.worker.GRACE", 0.5)
    monkeypatch.setattr("forge_sandbox.worker.EXIT_TIMEOUT", 0.2)
    sandbox = opened("namespaces", SELF, workers=1)
    before = below(os.getpid())
    run(sandbox, "1")
    for pid in below(os.getpid()) - before:
        os.kill(pid, signal.SIGSTOP)
    assert run(sandbox, "print(1)", time_limit=5.0).stdout == "1\n"
    everything = below(os.getpid()) - before
    asyncio.run(sandbox.close())
    assert gone(everything)


def test_cancelling_sandbox_run_ends_program(sandboxes):
    sandbox = opened("namespaces", SELF, workers=1)

    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sandbox.run("while True: pass", time_limit=600.0), 0.3)
        assert (await sandbox.run("print(1)")).stdout == "1\n"
        running = asyncio.create_task(sandbox.run("while True: pass", time_limit=600.0))
        await asyncio.sleep(0.2)
        await sandbox.close()
        with pytest.raises(SandboxError, match=r"end|closed"):
            await running

    before = below(os.getpid())
    asyncio.run(main())
    assert gone(below(os.getpid()) - before)


@pytest.mark.parametrize(("level", "user"), CASES)
def test_sandboxed_programs_end_when_parent_is_killed(level, user):
    """Also where another process has inherited what the parent had open."""
    number = whose(user)
    script = f"""
import asyncio, os, sys, time
sys.path[:0] = {sys.path!r}
from forge_sandbox import Sandbox
async def main():
    sandbox = Sandbox({level!r}, workers=1, user={number}, python={python_of(number)!r})
    await sandbox.run("1")
    if not os.fork():
        time.sleep(100)
    print("ready", flush=True)
    await sandbox.run("import time; time.sleep(100)", time_limit=100.0)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "ready\n"
    while len(everything := below(parent.pid)) < 4:
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    left = {pid for pid in everything if Path(f"/proc/{pid}/cmdline").exists() and b"time.sleep(100)" in _words(pid)}
    assert gone(everything - left)
    for pid in left:
        os.kill(pid, signal.SIGKILL)


def _words(pid: int) -> bytes:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
    return words if b"import asyncio, os, sys, time" in words else b""
