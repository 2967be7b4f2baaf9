"""Nothing of a run takes orders from other users of the machine: its sockets, its log, its ranks."""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from forge.system.interpose import imports

from tests.runtime.controller.test_endings import start
from tests.trees import descendants

pytestmark = pytest.mark.processes

STRANGER = 21002
LISTENING = 0x10000  # a flag of /proc/net/unix
MONARCH = """
    import time
    from monarch.actor import this_host
    this_host().spawn_procs({"procs": 1})
    print("READY", flush=True)
    time.sleep(100)
"""


def listeners(root: int) -> tuple[set[str], set[str]]:
    """On which the tree of a process listens: names of UNIX sockets, and `address:port` of TCP sockets in hex."""
    inodes = set()
    for pid in descendants(root):
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(handle)))
            except FileNotFoundError:
                continue
    unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    names = {row[7] for row in unix if len(row) > 7 and row[6] in inodes and int(row[3], 16) & LISTENING}
    tcp = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return names, {row[1] for row in tcp if row[3] == "0A" and row[9] in inodes}


def reached_by_a_stranger(names: set[str]) -> set[str]:
    """Those that another user can connect to."""
    script = """
        import os, socket, sys
        os.setgroups([])
        os.setgid(int(sys.argv[1]))
        os.setuid(int(sys.argv[1]))
        for name in sys.argv[2:]:
            with socket.socket(socket.AF_UNIX) as attempt:
                try:
                    attempt.connect(name.replace("@", chr(0), 1) if name.startswith("@") else name)
                    print(name)
                except PermissionError:
                    continue
    """
    words = [sys.executable, "-c", textwrap.dedent(script), str(STRANGER), *sorted(names)]
    asked = subprocess.run(words, capture_output=True, text=True, check=True)
    return set(asked.stdout.split())


def kept_open(port: int, user: int) -> bool:
    """Whether a connection of a user, from whatever address of this machine, is neither rejected nor ended."""
    script = """
        import os, socket, sys
        "host".encode("idna")  # imports what another user may not read
        if os.geteuid() != int(sys.argv[2]):
            os.setgroups([])
            os.setgid(int(sys.argv[2]))
            os.setuid(int(sys.argv[2]))
        for source in ("127.0.0.1", "127.9.8.7"):
            with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 20, (source, 0)) as attempt:
                attempt.settimeout(3)
                try:
                    print("ended" if attempt.recv(1) == b"" else "answered")
                except TimeoutError:
                    print("open")
                except ConnectionError:
                    print("ended")
    """
    words = [sys.executable, "-c", textwrap.dedent(script), str(port), str(user)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert not done.stderr
    found = set(done.stdout.split())
    assert len(found) == 1
    return found == {"open"}


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture(scope="module")
def a_run():
    process, _ = start(
        """
        from forge.runtime.controller import forked_processes
        from tests.runtime.controller.components import Joined
        with forked_processes():
            ranks = await Joined.options(procs=2).as_service()
            remote = await Counter.options(hosts=1).as_service()
            print("ALL", flush=True)
            await asyncio.sleep(100)
        """.replace("\n        ", "\n    ")
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line == "ALL\n":
            break
    yield process
    process.kill()
    process.communicate()


def test_no_socket_of_a_run_is_open_to_other_users(a_run: subprocess.Popen):
    names, addresses = listeners(a_run.pid)
    assert len(names) >= 4
    assert not [name for name in names if name.startswith("@")]
    assert [name for name in names if Path(name).name.startswith("fork")]
    (folder,) = {re.match(r".*/forge-run-[^/]*", name)[0] for name in names}  # type: ignore[index]
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    if os.geteuid() == 0:
        assert reached_by_a_stranger(names) == set()
    # gloo's pairs, which have no other transport: they end a stranger's connection at once.
    assert {address.partition(":")[0] for address in addresses} == {"0100007F"}
    ports = [int(address.partition(":")[2], 16) for address in addresses]
    if os.geteuid() == 0:
        assert not any(kept_open(port, STRANGER) for port in ports)
    # The last one, because gloo does not survive a connection that says nothing and ends.
    assert kept_open(ports[0], os.geteuid())


@pytest.mark.full
@as_root
def test_the_sockets_of_monarch_itself_are_open_to_them():
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(MONARCH)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "READY\n"
        assert reached_by_a_stranger({name for name in listeners(process.pid)[0] if name.startswith("@")})
    finally:
        # Monarch's process would notice after 30 s that this one is gone.
        for pid in [*descendants(process.pid)][::-1]:
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def test_what_was_started_before_forge_is_a_warning():
    script = """
        import asyncio
        from monarch.actor import this_host
        this_host()
        from forge.runtime.controller import run
        from tests.runtime.controller.components import Counter
        async def main():
            await Counter.as_service()
        run(main())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (
        "every local user, and every container in this network namespace, can run code as you"
        in done.stdout + done.stderr
    )
    assert "Monarch internal logs are being written to" in done.stderr  # and so they are


def test_the_name_of_a_strangers_socket_may_be_any_bytes(monkeypatch: pytest.MonkeyPatch):
    from forge.runtime.controller.private import warn_if_exposed

    with socket.socket(socket.AF_UNIX) as odd:
        odd.bind(b"\0\xff\xfe" + os.urandom(4))
        warn_if_exposed.__wrapped__()
    monkeypatch.setattr(Path, "read_bytes", hidden)
    warn_if_exposed.__wrapped__()


def hidden(path: Path) -> bytes:
    raise FileNotFoundError(path)


def test_a_long_TMPDIR_is_no_obstacle(tmp_path: Path):
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    script = """
        from forge.runtime.controller import run
        from tests.runtime.controller.components import Counter
        async def main():
            counter = await Counter.options(procs=2).as_service()
            print(await counter.where.route())
        run(main())
    """
    words = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=os.environ | {"TMPDIR": str(folder)})
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert not list(folder.iterdir())


def test_other_programs_inherit_the_environment_of_the_user():
    """Slurm, for one, copies it to machines that have no folder of this run."""
    script = """
        import os
        from forge.runtime.controller import run
        from tests.runtime.controller.components import Counter
        before = dict(os.environ)
        async def main():
            counter = await Counter.options(procs=2).as_service()
            await counter.where.route()
            assert os.environ == before, set(os.environ.items()) ^ set(before.items())
        run(main())
        assert os.environ == before
    """
    words = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_no_process_of_a_run_has_a_log_of_a_name_that_others_can_guess(a_run: subprocess.Popen):
    opened = []
    for pid in descendants(a_run.pid):
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            try:
                opened.append(os.readlink(handle))
            except FileNotFoundError:
                continue
    assert [name for name in opened if name.endswith("(deleted)")]  # a file without a name
    assert not [name for name in opened if "monarch_log" in name]


def test_only_the_log_that_is_written_is_announced(tmp_path: Path):
    """Monarch's line names its usual log, which is another one in a run, on the controller's host and on its own."""
    script = f"""
        from pathlib import Path
        from forge.runtime.controller import run
        from forge.runtime.controller.private import log_to
        from tests.runtime.controller.components import Counter
        async def main():
            log_to(Path({str(tmp_path)!r}, "monarch.log"))
            print(await (await Counter.as_service()).add.route(1))
            print(await (await Counter.options(hosts=1).as_service()).add.route(2))
        run(main())
        import os
        os.write(2, b"Monarch internal logs are being written to /here\\n")
    """
    words = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n2\n"), done.stderr
    assert [line for line in done.stderr.splitlines() if "onarch" in line] == [
        "Monarch internal logs are being written to /here"  # of another library than Monarch's
    ]
    assert (tmp_path / "monarch.log").stat().st_size


def test_threads_of_monarch_write_without_python_once_a_host_is_up():
    """One that is in Python's hands while the interpreter ends aborts the process, after all that it did went well."""
    script = """
        import ctypes
        from forge.system import interpose
        from forge.runtime.controller import private, run
        from tests.runtime.controller.components import Counter
        async def main():
            print(await (await Counter.options(hosts=1).as_service()).add.route(1))
        run(main())
        path, base = interpose._loaded(private.MAPPED)
        libc = ctypes.cast(ctypes.CDLL(None).write, ctypes.c_void_p).value
        places = [ctypes.c_void_p.from_address(base + slot).value for slot in interpose.imports(path, b"write")]
        print(len(places) > 0 and set(places) == {libc})
    """
    words = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "1\nTrue\n"), done.stderr
    assert "internal logs" not in done.stderr


def test_a_page_stays_as_writable_as_it_was():
    import ctypes
    import mmap

    from forge.system import interpose

    page = mmap.mmap(-1, mmap.PAGESIZE)
    view = ctypes.c_char.from_buffer(page)
    slot = ctypes.addressof(view)
    assert interpose._write(slot, 5) == 0
    page[8] = 1  # of a library's lazy imports, which the loader writes later
    interpose._libc.mprotect(slot, mmap.PAGESIZE, mmap.PROT_READ)
    assert interpose._write(slot, 6) == 5
    assert not interpose._writable(slot)
    interpose._libc.mprotect(slot, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE)


def test_imports_are_found_where_the_loader_says():
    import ctypes

    import torch

    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    base = next(
        int(line.partition("-")[0], 16)
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(f" {path.resolve()}") and line.split()[2] == "00000000"
    )
    places = list(imports(str(path), b"getenv"))
    assert places
    function = ctypes.cast(ctypes.CDLL(None).getenv, ctypes.c_void_p).value
    assert {ctypes.c_void_p.from_address(base + place).value for place in places} == {function}


def test_a_library_that_imports_otherwise_is_a_warning(caplog: pytest.LogCaptureFixture):
    import ctypes

    from forge.system.interpose import replace

    libc = ctypes.CDLL(None).sched_yield
    replacement = replace("/torch/lib/libtorch_cpu.so", {"no_such_function": libc}, "nothing is held")
    assert not replacement.names
    assert "no_such_function of /torch/lib/libtorch_cpu.so: not replaced" in caplog.text
    assert caplog.text.rstrip().endswith("nothing is held")


def test_replacing_can_be_switched_off():
    """A service works without it, and one warning says what is not held."""
    script = """
        from forge.runtime.controller import run
        from tests.runtime.controller.components import Counter
        async def main():
            print(await (await Counter.as_service()).add.route(1))
        run(main())
    """
    environment = {**os.environ, "FORGE_INTERPOSE": "0"}
    words = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert done.stderr.count("every local user") == 1, done.stderr
