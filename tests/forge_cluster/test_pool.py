"""Which host a replica goes to, and what is said where there is none."""

import pytest
from hypothesis import given, strategies as st

from forge_cluster.inventory import Inventory
from forge_cluster.pool import parse_addresses
from forge_cluster.rooms import Demand, HostRoom, NoHostRoom, check_fit, choose_rooms, largest_first


def host(name: str, gpus: int = 8, cores: int = 64, gigabytes: int = 1000) -> Inventory:
    numbers = tuple(str(number) for number in range(gpus))
    return Inventory(name, numbers, cores, gigabytes * 10**9, 10**11)


def place(rooms: list[HostRoom], demands: list[Demand]) -> list[list[str]]:
    """The names of the hosts of each demand."""
    found = []
    for demand in largest_first(demands):
        chosen = choose_rooms(rooms, demand)
        for room in chosen:
            room.reserve(demand, demand.procs // len(chosen))
        found.append([room.inventory.name for room in chosen])
    return found


def test_documented_512_gpu_services_are_placed():
    """As on the slides of the documents: policies of 16 x 8, a trainer of 1 x 128, 4 x 4 of rewards, 16 of none."""
    rooms = [HostRoom.of_host(host(f"n{number}")) for number in range(64)]
    demands = [
        *(Demand(f"policy[{n}]", procs=8, gpus=1, hosts=1) for n in range(16)),
        Demand("trainer", procs=128, gpus=1),
        *(Demand(f"reward[{n}]", procs=4, gpus=1) for n in range(4)),
        *(Demand(f"coder[{n}]") for n in range(16)),
    ]
    found = place(rooms, demands)
    assert [len(hosts) for hosts in found] == [16, *[1] * 36]
    assert sum(len(room.gpus) for room in rooms) == 512 - 128 - 128 - 16
    policies = {name for hosts in found[1:17] for name in hosts}
    assert len(policies) == 16  # a whole host each
    assert not policies & {*found[0]}
    rewards = [hosts[0] for hosts in found[17:21]]
    assert len({*rewards}) == 2  # two of four GPUs share a host
    check_fit([host(f"n{number}") for number in range(64)], demands)


def test_oversized_placement_error_lists_free_devices():
    hosts = [host("a", 8), host("b", 2)]
    demands = [Demand("services.trainer", procs=8, gpus=1), Demand("services.generator, replica 0", procs=4, gpus=1)]
    with pytest.raises(NoHostRoom) as caught:
        check_fit(hosts, demands)
    assert str(caught.value) == (
        "no host has room for services.generator, replica 0: 4 processes with 1 GPUs each: a has 0 of 8 GPUs free, "
        "1000 GB: 0 of these processes fit; b has 2 of 2 GPUs free, 1000 GB: 2 of these processes fit"
    )
    with pytest.raises(NoHostRoom, match="no host has room for x: 1 processes: no host is up"):
        check_fit([], [Demand("x")])
    with pytest.raises(NoHostRoom, match=r"no host has room for x: 2 processes and 600\.0 GB each on 1 hosts"):
        check_fit(hosts, [Demand("x", procs=2, memory=600 * 10**9, hosts=1)])


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(1, 64)), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(1, 16), st.integers(0, 4), st.integers(1, 4)), max_size=12),
)
def test_devices_have_one_owner_and_are_free_after_release(hosts, wanted):
    rooms = [HostRoom.of_host(host(f"n{n}", gpus, cores)) for n, (gpus, cores) in enumerate(hosts)]
    before = [list(room.gpus) for room in rooms]
    taken = []
    for n, (procs, gpus, threads) in enumerate(wanted):
        demand = Demand(f"x[{n}]", procs=procs, gpus=gpus, threads=threads)
        try:
            chosen = choose_rooms(rooms, demand)
        except NoHostRoom:
            assert gpus
            continue
        each = procs // len(chosen)
        assert each * len(chosen) == procs
        for room in chosen:
            mine = room.reserve(demand, each)
            assert len(mine) == each * gpus
            taken.append((room, demand, each, mine))
    for room, name in zip(rooms, before, strict=True):
        owned = [gpu for other, _, _, mine in taken if other is room for gpu in mine]
        assert len(owned) == len({*owned})
        assert sorted([*owned, *room.gpus]) == sorted(name)
    for room, demand, each, mine in reversed(taken):
        room.release(demand, each, mine)
    assert [room.gpus for room in rooms] == before
    assert [room.threads for room in rooms] == [0] * len(rooms)


def test_host_addresses_are_parsed_from_text_file_and_directory(tmp_path):
    assert parse_addresses("a, b:8000,[fe80::1]:9,10.0.0.1") == ["a:7070", "b:8000", "[fe80::1]:9", "10.0.0.1:7070"]
    assert parse_addresses(["a"]) == ["a:7070"]
    file = tmp_path / "hosts"
    file.write_text("a  # the first\n\n# none\nb:8000 slots=8\n")
    assert parse_addresses(str(file)) == ["a:7070", "b:8000"]
    folder = tmp_path / "registered"
    folder.mkdir()
    (folder / "m3").write_text("m3:7071\n")
    (folder / "m2").write_text("m2:7070\n")
    assert parse_addresses(str(folder)) == ["m2:7070", "m3:7071"]
    for wrong, why in (
        ("a:b", "'b' is not a port"),
        ("a,a:7070", "hosts must be distinct, got a:7070 twice"),
        ("1::2:3", "IPv6"),
    ):
        with pytest.raises(ValueError, match=why):
            parse_addresses(wrong)
    with pytest.raises(OSError, match="none"):
        parse_addresses(str(tmp_path / "none"))
