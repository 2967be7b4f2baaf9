"""What goes between machines: groups of ranks, weights, and who may listen or speak."""

import os
import re
import signal
import sys

import pytest
import torch

from tests.forge_cluster.machines import ROOT, Controller, environment, inside, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.full]


@pytest.mark.parametrize("lab", [4], indirect=True)
def test_ranks_on_several_hosts_run_all_reduce(lab):
    controller = Controller(lab[0], "ranks", "6", "3", hosts="m2,m3,m4")
    controller.read("ready")
    where = [host for _, host, _ in controller.ask("where")]
    assert where == ["m2", "m2", "m3", "m3", "m4", "m4"]
    total = 21.0
    assert controller.ask("reduce") == [[6 * total, "m4"]] * 6
    controller.end()


@pytest.mark.parametrize("writer", ["m2:7070", pytest.param("home", marks=pytest.mark.slow)])
def test_stored_weights_reach_every_host_intact(lab, writer):
    controller = Controller(lab[0], "weights", writer, hosts="m2,m3")
    controller.read("ready")
    size = 20_000_000  # 80 MB: several chunks
    for version in (1, 2, 3, 4):
        assert controller.ask("put", version=version, size=size) == version
        found = controller.ask("get", version=version)
        total = version * (size * (size - 1) / 2 + 9)
        for _, got, _ in found:
            assert got == pytest.approx(total, rel=1e-6)
        assert {host for host, _, _ in found} == {"m2", "m3"}
        here = controller.ask("here", version=version)
        assert here[0] == "m1"
        assert {digest for _, _, digest in [*found, here]} == {found[0][2]}
    for machine in lab[1:]:  # two versions are kept, and what is being written
        segments = machine.run(["sh", "-c", "ls /dev/shm/forge-weights-*/segments | wc -l"], capture_output=True)
        assert int(segments.stdout) <= 4
    controller.end()


def test_cluster_transport_is_encrypted_and_authenticated(lab, tmp_path):
    capture = tmp_path / "capture"
    sniffer = lab[1].start(
        [sys.executable, "-m", "tests.forge_cluster.sniff", str(capture)], str(ROOT), env=environment()
    )
    wait_until(capture.exists, 20, "the capture begins")
    controller = Controller(lab[0], "weights", "m2:7070", hosts="m2,m3")
    controller.read("ready")
    controller.ask("put", version=1, size=1_000_000)
    controller.ask("get", version=1)
    os.kill(inside(sniffer), signal.SIGTERM)
    sniffer.wait(10)
    listeners = []
    for machine in lab:
        text = machine.run(["ss", "-ltnpH"], capture_output=True, text=True).stdout
        for line in text.splitlines():
            address, port = line.split()[3].rsplit(":", 1)
            listeners.append((machine, address, int(port), line.split()[-1]))
    for machine, address, port, owner in listeners:
        if address.startswith("127."):
            continue
        assert address == machine.address, f"{owner} listens at {address}"
        said = without_certificate(lab[0], address, port)
        assert said == "b''\n" or "alert" in said.lower(), f"{owner} at {port}: {said}"
    controller.end()
    seen = capture.read_bytes()
    assert len(seen) > 4_000_000  # the version went from here to m3
    weights = torch.arange(5000, 5008, dtype=torch.float32).numpy().tobytes()
    for plain in (b"policy", b"monarch", b'"do"', bytes(64), weights):  # the name "forge" is in TLS's first message
        found = [match.start() for match in re.finditer(re.escape(plain), seen)]
        assert not found, f"{plain!r} is readable between machines"


def without_certificate(machine, address: str, port: int) -> str:
    """What a peer without a certificate gets."""
    program = (
        "import ssl, socket, sys\n"
        "context = ssl.create_default_context(); context.check_hostname = False; context.verify_mode = ssl.CERT_NONE\n"
        "try:\n"
        "    with context.wrap_socket(socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)) as peer:\n"
        "        peer.send(b'{}\\n'); print(peer.recv(100))\n"
        "except Exception as error: print(error)\n"
    )
    command = [sys.executable, "-c", program, address, str(port)]
    return machine.run(command, capture_output=True, text=True, timeout=10).stdout


def test_wrong_cluster_secret_raises_one_line_error(lab):
    own = environment("another secret, as long as the first one is", FORGE_HOSTS="m2,m3")
    command = [sys.executable, "-m", "tests.forge_cluster.controllers", "replicas", "1", "1"]
    done = lab[0].run(command, str(ROOT), env=own, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "host m2:7070 has another secret, or something else listens there" in done.stderr
