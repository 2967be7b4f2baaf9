"""`forge tinker --model MODEL`: serve the Tinker protocol until interrupted."""

import argparse
import asyncio
import signal
from pathlib import Path
from typing import Any

from forge.cli.subparsers import Subparsers, add_command


def add_to(commands: Subparsers) -> None:
    """Add the command `forge tinker` to the subparsers `commands`."""
    add_command(
        commands,
        "tinker",
        "serve the Tinker protocol",
        "--model runs/quickstart/model, then TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python "
        "program.py",
        serve_protocol,
        [
            ("--model", {"required": True, "help": "folder or hub id of the base model"}),
            ("--name", {"help": "what clients call the model; by default --model"}),
            ("--host", {"default": "127.0.0.1", "help": "address to listen at"}),
            ("--port", {"type": int, "default": 8000, "help": "0 takes a free one"}),
            ("--folder", {"default": "runs/tinker", "help": "where models, checkpoints and the journal are kept"}),
            ("--config", {"help": "YAML file with `tenants` and `engine`, see docs/tinker.md"}),
        ],
        description="Serve the Tinker protocol: programs of its SDK and cookbook train adapters of one model here. "
        "What clients have saved and asked for survives a kill of the server: start it again with the same folder.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )


def serve_protocol(args: argparse.Namespace) -> None:
    """Load the model, then serve until interrupted.

    Raises:
        ValueError, OSError, ImportError: an option or the model is invalid.
    """
    from forge_http.web import bind_socket, is_loopback  # isort: skip (it names a missing package with its fix)
    from forge.config.yaml_files import read_yaml
    from forge.models import check_family, open_tokenizer, resolve_model

    from .tenants import TinkerSettings
    from .wire import protocol  # noqa: F401  (names the package that is missing)

    settings = TinkerSettings.model_validate(read_yaml(Path(args.config)) if args.config else {})
    if not settings.tenants and not is_loopback(args.host):
        raise ValueError(f"other machines reach {args.host}: give --config a file with `tenants`")
    check_family(args.model)
    model = resolve_model(args.model)
    open_tokenizer(model)
    with bind_socket(args.host, args.port) as listener:
        folder = Path(args.folder).resolve()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        asyncio.run(_serve(args, str(Path(model).resolve()), folder, settings, listener))


async def _serve(args: argparse.Namespace, model: str, folder: Path, settings: Any, listener: Any) -> None:
    from forge_http.web import serve_application

    from .journal import Journal
    from .learner import Learner, open_base
    from .requests import Requests
    from .sampler import Sampler
    from .server import UNSUPPORTED, TinkerServer

    name = args.name or args.model
    base = open_base(model, folder)
    journal, learner = Journal(folder), Learner(base)
    sampler = Sampler(base, **settings.engine)
    requests = Requests(folder, name, journal, learner, sampler)
    server = TinkerServer(requests, model, sampler.engine.max_seq_len, settings.tenants)
    requests.resume()

    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with serve_application(server.make_application(args.host), listener) as url:
        print(f"{name} is served at {url}: TINKER_BASE_URL={url}, TINKER_API_KEY=tml-...", flush=True)
        print(f"unsupported: {'; '.join(UNSUPPORTED.values())}; images; full weights; optimisers but AdamW", flush=True)
        await stopped.wait()
    sampler.close()
