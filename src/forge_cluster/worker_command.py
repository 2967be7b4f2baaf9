"""`forge worker`: make this machine a host for runs of other machines."""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from forge.cli.subparsers import Subparsers, add_command
from forge.system.files import write_atomic
from forge_http.addresses import join_address, listening_error

from .credentials import SECRET, check_certificates, read_secret
from .host import Daemon, routable_address
from .inventory import count_gpus
from .wire import PORT, split_address


def add_to(commands: Subparsers) -> None:
    """Add the command `forge worker` to the parser."""
    add_command(
        commands,
        "worker",
        "let a run on another machine start processes here; both need the same FORGE_SECRET",
        "--listen 10.0.0.2:7070 --gpus 0,1",
        run,
        [
            (
                "--listen",
                {
                    "metavar": "ADDRESS[:PORT]",
                    "help": "default: the address of this machine, port 7070; port 0 is a free one, see --register",
                },
            ),
            ("--gpus", {"help": "the GPUs that runs may use, 0,1,2; default: all that are visible"}),
            (
                "--grace",
                {
                    **{"type": float, "default": 0.0, "metavar": "SECONDS"},
                    "help": "at SIGTERM, tell the run and serve for so long until it has saved itself; default: end at "
                    "once",
                },
            ),
            # For programs that start workers: ssh, a job of a cluster, a launcher.
            ("--stdin", {"action": "store_true", "help": "read the secret from standard input, end when it closes"}),
            ("--register", {"metavar": "FOLDER", "help": "write the address to a file in this folder"}),
        ],
    )


def run(args: argparse.Namespace) -> None:
    """Serve runs until a signal ends the worker; invalid input ends it with one line."""
    try:
        address, port = split_address(args.listen) if args.listen else ("", PORT)
        address = address or routable_address()
        if address in ("0.0.0.0", "::"):
            raise ValueError(
                f"--listen {address} means every address: pass one address of this machine, or omit the option"
            )
        # Given by standard input, the secret is in no command line, which other users could read.
        if args.stdin:
            os.environ[SECRET] = sys.stdin.readline().strip()
        secret = read_secret()
        if args.register:
            Path(args.register).mkdir(parents=True, exist_ok=True)
        gpus = tuple(filter(None, args.gpus.split(","))) if args.gpus is not None else count_gpus()

        check_certificates()
    except (ImportError, ValueError, OSError, RuntimeError) as error:
        raise SystemExit(f"error: {error}") from error

    logging.basicConfig(level=logging.INFO, format="%(asctime)s forge worker: %(message)s", datefmt="%H:%M:%S")

    try:
        asyncio.run(_serve_daemon(Daemon(gpus, secret, address, port), args))
    except OSError as error:
        option = f"--listen {join_address(address, 0)}"
        raise SystemExit(f"error: {listening_error(address, port, error, option)}") from error


async def _serve_daemon(daemon: Daemon, args: argparse.Namespace) -> None:
    """Serve until a signal or, with --stdin, the end of standard input.

    The address is written to the folder of --register while the daemon serves, and printed with --stdin.
    """
    log = logging.getLogger("forge.worker")
    file = Path(args.register) / socket.gethostname() if args.register else None

    def report_ready(port: int) -> None:
        location = join_address(daemon.address, port)
        log.info("listening at %s, %d GPUs", location, len(daemon.gpus))
        if args.stdin:
            print(location, flush=True)
            os.dup2(2, 1)  # nothing reads later output of this worker and its processes
        if file is not None:
            write_atomic(file, f"{location}\n")

    serving = asyncio.ensure_future(daemon.serve(report_ready))
    loop = asyncio.get_running_loop()

    # With --grace a machine that will be taken away serves until its run has saved its state.
    async def leave_gracefully() -> None:
        if args.grace and daemon.leave():
            log.warning("SIGTERM: the run was notified and has %g s to save", args.grace)
            await asyncio.wait([asyncio.ensure_future(daemon.released())], timeout=args.grace)
        serving.cancel()

    leaving: list[asyncio.Task] = []  # a reference keeps it alive
    loop.add_signal_handler(signal.SIGTERM, lambda: leaving.append(loop.create_task(leave_gracefully())))

    # A worker ends with the terminal or the connection that started it.
    for number in (signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, serving.cancel)
    if args.stdin:
        loop.add_reader(sys.stdin.fileno(), lambda: None if os.read(sys.stdin.fileno(), 1024) else serving.cancel())

    try:
        await serving
    except asyncio.CancelledError:
        log.info("ended")
    finally:
        if file is not None:
            file.unlink(missing_ok=True)
