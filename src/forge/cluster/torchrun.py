"""For launchers that start the same program on every machine, such as torchrun, mpirun or srun:

    FORGE_SECRET=... torchrun --nnodes 4 --nproc-per-node 1 --rdzv-endpoint HOST:29400 \\
        -m forge.cluster.torchrun train CONFIG --training.steps 100

Rank 0 is the controller and has a worker, all others have a worker. It reads RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT, and exchanges the workers' addresses by torch.distributed's store, which sees nothing else.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from datetime import timedelta

from .process import run_as_child

MEETING = timedelta(minutes=10)


def main() -> int:
    """Start the worker of this rank, and at rank 0 the run; returns its exit code."""
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if "FORGE_SECRET" not in os.environ:
        if world > 1:
            raise SystemExit(
                "error: FORGE_SECRET is not set: set it to the same 32 characters or more on every machine"
            )
        os.environ["FORGE_SECRET"] = secrets.token_hex(32)
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, world, is_master=rank == 0 and not agent, timeout=MEETING)
    life = f"forge/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"  # of torchrun: every restart meets again
    command = [sys.executable, "-m", "forge", "worker", "--listen", ":0", "--stdin"]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(os.environ["FORGE_SECRET"] + "\n")
    worker.stdin.flush()
    try:
        listening = worker.stdout.readline().strip()
        if not listening:
            raise SystemExit(f"error: the worker of rank {rank} ended with {worker.wait()}")
        store.set(f"{life}/{rank}", listening)
        if rank:
            store.wait([f"{life}/over"], timedelta(days=365))
            return int(store.get(f"{life}/over"))
        hosts = [store.get(f"{life}/{other}").decode() for other in range(world)]
        own = {**os.environ, "FORGE_HOSTS": ",".join(hosts), "FORGE_EXPECT_HOSTS": str(world)}
        # The run's own processes are no ranks of torchrun.
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            own.pop(name, None)
        code = run_as_child([sys.executable, "-m", "forge", *sys.argv[1:]], own)
        store.set(f"{life}/over", str(code))
        return code
    finally:
        worker.stdin.close()
        worker.wait()


if __name__ == "__main__":
    sys.exit(main())
