"""Versions that go to other machines as patches to the one before: equal, smaller, and whole where that fails."""

import time

import pytest

from tests.runtime.cluster.machines import Controller, Machines, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.full]


@pytest.mark.parametrize("writer", [pytest.param("m2:7070", marks=pytest.mark.slow), "home"])
def test_a_step_is_sent_as_a_patch_and_whole_if_the_base_is_damaged(lab: Machines, writer: str):
    controller = Controller(lab[0], "weights", writer, "always", hosts="m2,m3")
    controller.read("ready")
    fractions, fallbacks = {}, {}
    for version in (1, 2, 3, 4, 5):
        if version == 4:
            assert controller.ask("damage", version=3, host="m3") == 1
        controller.ask("step", version=version, size=10_000_000, share=0.02)
        readers = [*controller.ask("get", version=version), controller.ask("here", version=version)]
        assert {host for host, _, _ in readers} == {"m1", "m2", "m3"}
        assert len({digest for _, _, digest in readers}) == 1
        metrics = controller.ask("metrics")
        fractions[version], fallbacks[version] = metrics["weight_sync/sent_fraction"], metrics["weight_sync/fallbacks"]
        assert metrics["weight_sync/bytes"] <= 1.1 * 2 * 40_000_036
    assert fractions[1] == 1
    assert fallbacks == {1: 0, 2: 0, 3: 0, 4: 1, 5: 0}
    assert max(fractions[2], fractions[3], fractions[5]) < 0.1
    assert fractions[4] > 0.5
    # Hosts that missed an update: the base is the one before, of which the sender has a copy.
    for version in (6, 7):
        controller.ask("step", version=version, size=10_000_000, share=0.02)
    readers = [*controller.ask("get", version=7), controller.ask("here", version=7)]
    assert len({digest for _, _, digest in readers}) == 1
    metrics = controller.ask("metrics")
    assert metrics["weight_sync/sent_fraction"] < 0.1
    assert metrics["weight_sync/fallbacks"] == 0
    controller.end()


@pytest.mark.slow
def test_a_version_comes_whole_to_hosts_whose_version_no_other_host_has(lab: Machines):
    controller = Controller(lab[0], "weights", "home", "always", hosts="m2,m3")
    controller.read("ready")
    for version in (1, 2, 3, 4):  # the store keeps two
        controller.ask("step", version=version, size=1_000_000, share=0.02)
        if version in (1, 4):
            assert len({digest for _, _, digest in controller.ask("get", version=version)}) == 1
    metrics = controller.ask("metrics")
    assert metrics["weight_sync/sent_fraction"] == 1
    assert metrics["weight_sync/fallbacks"] == 0
    controller.end()


@pytest.mark.slow
def test_versions_come_whole_where_patches_are_off(lab: Machines):
    controller = Controller(lab[0], "weights", "m2:7070", "never", hosts="m2,m3")
    controller.read("ready")
    for version in (1, 2):
        controller.ask("step", version=version, size=1_000_000, share=0.0)
        controller.ask("get", version=version)
        assert controller.ask("metrics")["weight_sync/sent_fraction"] == 1
    controller.end()


@pytest.mark.slow
@pytest.mark.parametrize("lab", [4], indirect=True)
def test_a_sender_that_is_lost_within_a_patch_costs_no_bit(lab: Machines):
    """A host that passes the patch on is killed: the next one in the chain takes it from the host that wrote it."""
    controller = Controller(lab[0], "weights", "m2:7070", "always", hosts="m2,m3,m4")
    controller.read("ready")
    size = 20_000_000
    controller.ask("step", version=1, size=size, share=1.0)
    controller.ask("get", version=1)
    for machine in lab:
        machine.slow("100mbit")
    controller.ask("step", version=2, size=size, share=1.0)
    controller.send("get", version=2)
    # Memory of the second version beside the first one: the patch, about 40 MB, takes three seconds from then on.
    two = 2 * size * 4 // 1024 - 1000
    full = f"test $(du -s /dev/shm | cut -f1) -gt {two}"
    wait_until(lambda: lab[2].run(["sh", "-c", full]).returncode == 0, 60, "the patch is on its way")
    time.sleep(1.0)
    lab[2].kill()
    answer = controller.read("answer")
    assert len(answer["value"]) == 3
    assert len({digest for _, _, digest in answer["value"]}) == 1
    controller.end()
