"""Start of a run by launchers that start the same program on every machine, such as torchrun, mpirun or srun:

    FORGE_SECRET=... torchrun --nnodes 4 --nproc-per-node 1 --rdzv-endpoint HOST:29400 \\
        -m forge_cluster.torchrun train CONFIG --training.steps 100

Every rank starts a worker, and rank 0 also the controller. The program reads RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT. By torch.distributed's store the ranks exchange the addresses of their workers and the exit code.
"""

import os
import secrets
import sys
from datetime import timedelta

from .credentials import SECRET, read_secret
from .processes import NotStarted, run_as_child, start_workers

MEETING_TIMEOUT = timedelta(minutes=10)  # machines of one job may boot minutes apart
# Variables of the launcher, which the run must not see: it has its own ranks.
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def main() -> int:
    """Start the worker of this rank, and at rank 0 the run; return its exit code."""
    import torch.distributed as dist

    try:
        rank, world, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        address = os.environ["MASTER_ADDR"]
    except (KeyError, ValueError) as error:
        raise SystemExit(
            f"error: the variable {error} is missing or not a number: start this program with torchrun or a similar "
            "launcher"
        ) from None
    try:
        # On several machines all must have the same.
        secret = secrets.token_hex(32) if SECRET not in os.environ and world == 1 else read_secret()
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None

    # The ranks exchange the addresses of their workers in a store, which torchrun may already serve at this address.
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = dist.TCPStore(address, port, world, is_master=serves, timeout=MEETING_TIMEOUT)
    except dist.DistError as error:
        action = "listen" if serves else "reach rank 0"
        raise SystemExit(f"error: rank {rank} cannot {action} at MASTER_ADDR {address}:{port}: {error}") from None

    # After a restart by torchrun the ranks exchange under new keys.
    attempt = f"forge/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    command = [sys.executable, "-m", "forge", "worker", "--listen", ":0", "--stdin"]
    try:
        with start_workers({f"rank {rank}": command}, secret) as (listening,):
            store.set(f"{attempt}/{rank}", listening)

            # The other ranks serve until rank 0 stores the exit code of the run.
            if rank:
                store.wait([f"{attempt}/over"], timedelta(days=365))
                return int(store.get(f"{attempt}/over"))

            hosts = [store.get(f"{attempt}/{number}").decode() for number in range(world)]
            environment = {
                **{name: value for name, value in os.environ.items() if name not in RANKS},
                **{"FORGE_HOSTS": ",".join(hosts), "FORGE_EXPECT_HOSTS": str(world), SECRET: secret},
            }
            code = run_as_child([sys.executable, "-m", "forge", *sys.argv[1:]], environment)
            store.set(f"{attempt}/over", str(code))
            return code
    except NotStarted as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
