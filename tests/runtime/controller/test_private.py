"""Nothing of a run takes orders from other users of the machine: its sockets, its ranks."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.runtime.controller.test_endings import start
from tests.trees import descendants

pytestmark = pytest.mark.processes

STRANGER = 21002
LISTENING = 0x10000  # a flag of /proc/net/unix


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


def test_controller_sockets_are_private_to_user(a_run: subprocess.Popen):
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


def test_controller_run_works_with_long_tmpdir(tmp_path: Path):
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


def test_controller_run_does_not_change_environment_variables():
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
