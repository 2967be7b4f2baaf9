"""`forge watch runs/`: a page over the folders of runs. `forge report RUN`: the page of one run, as a file."""

import argparse
import asyncio
from contextlib import suppress
from pathlib import Path

from forge.cli.subparsers import Subparsers, add_command

PORT = 8420


def add_to(commands: Subparsers) -> None:
    """Add the commands `forge watch` and `forge report` to the parser."""
    add_command(
        commands,
        "watch",
        "show runs in a browser, also while they run: curves, time, every token of rollouts",
        "runs/",
        run_watch,
        [
            ("folder", {"nargs": "?", "type": Path, "default": Path("runs"), "help": "of runs, or a run: runs/"}),
            ("--port", {"type": int, "default": PORT, "help": f"default: {PORT}; 0 takes a free one"}),
            ("--host", {"default": "127.0.0.1", "help": "others than this machine need FORGE_API_KEY"}),
        ],
    )
    add_command(
        commands,
        "report",
        "write report.html of a run: the page of `forge watch` as one file",
        "runs/quickstart",
        run_report,
        [("folder", {"type": Path, "metavar": "RUN"})],
    )


def run_watch(args: argparse.Namespace) -> None:
    """Serve the page of the runs in a folder until interrupted."""
    if not args.folder.is_dir():
        raise ValueError(f"{args.folder} is not a directory of runs")
    from forge_http.web import bind_socket, required_key  # isort: skip (it names a missing package with its fix)
    from ..watch.server import Watch

    watch = Watch(args.folder, required_key(args.host))
    listener = bind_socket(args.host, args.port)

    async def serve_page() -> None:
        async with watch.listen(listener) as url:
            print(f"{args.folder} is shown at {url}", flush=True)
            await asyncio.Event().wait()

    with suppress(KeyboardInterrupt):
        asyncio.run(serve_page())


def run_report(args: argparse.Namespace) -> None:
    """Write the file report.html into the folder of a run, and print its path."""
    from forge.observability.folder import CONFIG

    from ..watch.report import write_report

    if not (args.folder / CONFIG).is_file():
        raise ValueError(f"{args.folder} is not a run directory: it has no {CONFIG}")
    write_report(args.folder)
    print(args.folder / "report.html")
