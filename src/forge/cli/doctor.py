"""`forge doctor cluster`: examine the hosts of a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

TEXT = "examine the hosts of a run: versions, clocks, bandwidth, GPUs, shared folder, limits"


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "doctor", help=TEXT, description=TEXT, epilog="example: forge doctor cluster --hosts node1,node2 --folder runs"
    )
    parser.add_argument("what", choices=["cluster"])
    parser.add_argument("--hosts", help="as cluster.hosts; default: FORGE_HOSTS")
    parser.add_argument("--folder", type=Path, help="that all hosts should see, such as runs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print what was found; exit code 1 if something is wrong."""
    import asyncio
    import os
    from tempfile import TemporaryDirectory

    from ..cluster.credentials import SECRET, Credentials, NoSecret, read_secret
    from ..cluster.doctor import examine, shown
    from ..cluster.pool import HOSTS, addresses

    try:
        if not (given := args.hosts or os.environ.get(HOSTS)):
            raise ValueError(f"which hosts? give --hosts, or set {HOSTS}")
        if (secret := read_secret()) is None:
            raise NoSecret(f"{SECRET} is not set: set it to the secret of the workers")
        with TemporaryDirectory() as folder:
            found = asyncio.run(examine(addresses(given), Credentials.make(secret, Path(folder)), args.folder))
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        raise SystemExit(f"error: {error}") from error
    print(shown(found))
    if found.problems:
        raise SystemExit(1)
