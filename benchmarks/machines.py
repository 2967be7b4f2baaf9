"""Several machines, made of Linux namespaces (needs root): weights, many workers, and faults while a run goes on.

    python benchmarks/machines.py weights --gigabytes 1 --rate 1gbit   # one transfer against three, over slow cables
    python benchmarks/machines.py scale --workers 8 32 64              # start, route, fanout, stop
    python benchmarks/machines.py chaos --steps 400 --every 30 60      # a GRPO run whose hosts are lost again and again
    python benchmarks/machines.py matrix --steps 1500                  # each fault on the host of each component

The last two end with the weights of the same run without faults, bit for bit, or fail: in lock-step every group is then
trained once.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.forge_cluster.machines import Controller, Machine, Machines, environment, listens, trained, wait_until

CONFIG = "tests/forge_cluster/tiny.yaml"
PROCESSES = "[b]ootstrap_main|[f]orge.runtime.controller.child"  # in the command line of a component's


def started(count: int, folder: Path) -> Machines:
    """Machines with a worker on all but the first."""
    lab = Machines(count, shared=[ROOT, sys.prefix, folder])
    for machine in lab[1:]:
        machine.work(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: all(listens(machine) for machine in lab[1:]), 30 + 5 * count, "workers listen")
    return lab


def weights(gigabytes: float, rate: str, folder: Path) -> None:
    """Seconds until one host, and until three, have a version of another host. All hosts share this machine's cores, so
    what the readers do with a version that is already there is measured alone, and subtracted."""
    size = int(gigabytes * 1e9 / 4)
    took: dict[int, list[float]] = {1: [], 3: []}
    read: dict[int, list[float]] = {1: [], 3: []}
    for readers in (1, 3):
        with started(2 + readers, folder) as lab:
            hosts = ",".join(machine.name for machine in lab[1:])
            controller = Controller(lab[0], "weights", "m2:7070", hosts=hosts)
            controller.read("ready")
            for machine in lab:
                machine.slow(rate)  # what it receives, and what it sends:
                words = f"tc qdisc replace dev eth0 root tbf rate {rate} burst 256kb latency 50ms"
                machine.run(words.split(), check=True)
            for version in (1, 2):
                controller.ask("put", version=version, size=size)
                for times in (took, read):
                    controller.send("get", version=version)
                    answer = controller.read("answer")
                    assert len(answer["value"]) == readers + 1, answer
                    times[readers].append(answer["seconds"])
            controller.end()
    line = gigabytes * 8e9 / {"gbit": 1e9, "mbit": 1e6}[rate[-4:]] / float(rate[:-4])
    print(f"{gigabytes:g} GB at {rate}: {line:.1f} s on the line")
    for readers in took:
        pairs = ", ".join(
            f"{all_:.1f} s, of which {alone:.1f} s" for all_, alone in zip(took[readers], read[readers], strict=True)
        )
        print(f"to {readers} hosts: {pairs} to read it")
    median = statistics.median
    one, three = (median(a - b for a, b in zip(took[n], read[n], strict=True)) for n in (1, 3))
    print(f"three to one, medians: {median(took[3]) / median(took[1]):.2f}, without reading {three / one:.2f}")


def scale(workers: int, folder: Path) -> None:
    """Start, route, fanout and stop of one light replica on each of many hosts."""
    with started(workers + 1, folder) as lab:
        hosts = ",".join(machine.name for machine in lab[1:])
        began = time.monotonic()
        controller = Controller(lab[0], "replicas", str(workers), str(workers), hosts=hosts)
        controller.read("ready")
        start = time.monotonic() - began
        numbers = {}
        for what in ("route", "fanout"):
            controller.send("time", verb=what, calls=50)
            answer = controller.read("answer")
            numbers[what] = answer["value"]
        began = time.monotonic()
        controller.end()
        stop = time.monotonic() - began
    route, fanout = numbers["route"], numbers["fanout"]
    print(
        f"| {workers} | {start:.1f} | {1000 * route['seconds']:.2f} | {1000 * route['cpu']:.2f} | "
        f"{1000 * fanout['seconds']:.1f} | {1000 * fanout['cpu']:.1f} | {stop:.1f} |",
        flush=True,
    )


def training(steps: int, root: Path, **more: object) -> list[str]:
    """A run that learns so slowly that its groups never run out of signal."""
    settings = {"run.root": root, "training.steps": steps, "training.learning_rate": 1e-5, "checkpoint.every": 5}
    settings |= {name.replace("__", "."): value for name, value in more.items()}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "forge", "train", CONFIG, *words]


def undisturbed(steps: int, folder: Path, **more: object) -> str:
    command = training(steps, folder / "calm", **more)
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, capture_output=True)
    return trained(folder / "calm" / "tiny")


def power(machine: Machine) -> None:
    machine.kill()
    time.sleep(5)
    machine.boot()
    machine.work()


def cable(seconds: float):
    def pulled(machine: Machine) -> None:
        machine.cut()
        time.sleep(seconds)
        machine.heal()

    pulled.__name__ = f"cable out for {seconds:g} s"
    return pulled


def slow(machine: Machine) -> None:
    machine.slow("2mbit")
    time.sleep(10)
    machine.slow("1gbit")


def full_disk(machine: Machine) -> None:
    fill = "head -c 8g /dev/zero >/tmp/full 2>/dev/null; head -c 8g /dev/zero >/dev/shm/full 2>/dev/null; sleep 5; "
    machine.run(["sh", "-c", fill + "rm -f /tmp/full /dev/shm/full"])


def worker(machine: Machine) -> None:
    machine.run(["pkill", "-9", "-f", "[f]orge.@@CL@@.worker"])


def daemon(machine: Machine) -> None:
    machine.run(["pkill", "-9", "-f", "[f]orge worker"])
    time.sleep(1)
    machine.work()


def cable_for_good(machine: Machine) -> None:
    machine.cut()


FAULTS = [power, cable(2.0), cable(20.0), slow, full_disk, worker, daemon]


def chaos(steps: int, every: list[float], folder: Path, seed: int) -> None:
    """A run in lock-step whose hosts are lost one after the other."""
    expected, dice = undisturbed(steps, folder), random.Random(seed)
    with started(5, folder) as lab:
        hosts = ",".join(machine.name for machine in lab[1:])
        with (folder / "log").open("w") as log:
            own = environment(FORGE_HOSTS=hosts)
            process = lab[0].start(training(steps, folder), str(ROOT), env=own, stdout=log, stderr=log)
            wait_until((folder / "tiny" / "checkpoints").is_dir, 120, "the first checkpoint")
            began, faults = time.monotonic(), 0
            while process.poll() is None:
                fault, machine = FAULTS[faults % len(FAULTS)], dice.choice(lab[1:])
                print(
                    f"{time.monotonic() - began:6.1f} s  {fault.__name__.replace('_', ' ')} on {machine.name}",
                    flush=True,
                )
                fault(machine)
                faults += 1
                end = time.monotonic() + dice.uniform(*every)
                while time.monotonic() < end and process.poll() is None:
                    time.sleep(0.2)
        lines = (folder / "log").read_text()
        assert process.returncode == 0, lines[-4000:]
        took = time.monotonic() - began
    recovered = [float(line.rsplit(",", 1)[1].split()[0]) for line in lines.splitlines() if "serves again" in line]
    print(f"{steps} steps, {faults} faults in {took:.0f} s, {len(recovered)} replicas replaced", end="")
    print(f", median {statistics.median(recovered):.1f} s" if recovered else "", flush=True)
    same = trained(folder / "tiny") == expected
    print("the weights are those of the run without faults" if same else "THE WEIGHTS DIFFER")
    if not same:
        raise SystemExit(1)


def matrix(steps: int, roles: list[str], folder: Path) -> None:
    """For each component, a run where it alone is on a host, out of two. That host gets one fault after the other.
    Replay buffer and data set are not among them: a run whose host of those is lost ends, and has to be resumed."""
    nowhere = {"services__trainer__hosts": "null", "services__generator__hosts": "null"}
    expected = undisturbed(steps, folder, **nowhere)
    print("| on the host of | fault | steps again after, s | components replaced |\n|---|---|---|---|", flush=True)
    for role in roles:
        root = folder / role
        root.mkdir()
        with started(3, folder) as lab, (root / "log").open("w") as log:
            own = environment(FORGE_HOSTS="m2,m3")
            command = training(steps, root, **nowhere | {f"services__{role}__hosts": 1})
            process = lab[0].start(command, str(ROOT), env=own, stdout=log, stderr=log)
            wait_until(lambda root=root: latest(root) >= 10, 180, "the first steps")
            for fault in [*FAULTS, cable_for_good]:
                machine = max(lab[1:], key=lambda machine: machine.processes(PROCESSES))
                before, replaced, began = latest(root), serves_again(root), time.monotonic()
                fault(machine)
                wait_until(lambda root=root, before=before: latest(root) >= before + 10, 180, f"steps after {fault}")
                took, replaced = time.monotonic() - began, serves_again(root) - replaced
                assert process.poll() is None, f"the run ended before its faults: raise --steps\n{tail(root)}"
                print(f"| {role} | {fault.__name__.replace('_', ' ')} | {took:.1f} | {replaced} |", flush=True)
            assert process.wait(600) == 0, tail(root)
        if trained(root / "tiny") != expected:
            raise SystemExit(f"{role}: THE WEIGHTS DIFFER")
        print(f"{role}: the weights are those of the run without faults", flush=True)


def latest(root: Path) -> int:
    """The last step with a checkpoint."""
    names = (path.name for path in (root / "tiny" / "checkpoints").glob("step_*[0-9]"))
    return max((int(name.removeprefix("step_")) for name in names), default=0)


def serves_again(root: Path) -> int:
    return (root / "log").read_text().count("serves again")


def tail(root: Path) -> str:
    return (root / "log").read_text()[-4000:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["weights", "scale", "chaos", "matrix"])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=float, nargs=2, default=[30.0, 60.0])
    parser.add_argument("--roles", nargs="+", default=["trainer", "generator", "reward"])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        if arguments.part == "weights":
            weights(arguments.gigabytes, arguments.rate, Path(folder))
        elif arguments.part == "matrix":
            matrix(arguments.steps, arguments.roles, Path(folder))
        elif arguments.part == "chaos":
            chaos(arguments.steps, arguments.every, Path(folder), arguments.seed)
        else:
            print("| hosts | start, s | route, ms | CPU-ms | fanout, ms | CPU-ms | stop, s |")
            print("|---|---|---|---|---|---|---|")
            for workers in arguments.workers:
                scale(workers, Path(folder))


if __name__ == "__main__":
    main()
