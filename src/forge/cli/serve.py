"""`forge serve runs/x/model`: a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .table import Subparsers

MakeServer = Callable[[Any], Any]  # from a service of generators


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "serve",
        help="serve a model to OpenAI clients",
        description="Serve a model to OpenAI clients until it is interrupted: chat and completions, streaming, "
        "log-probabilities, token ids.",
        epilog="example: forge serve runs/quickstart/model --port 8000",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", help="folder or hub id; runs/x/model is what a run leaves behind")
    parser.add_argument("--name", help="what clients call the model; its folder's name if not given")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at; one that other machines reach needs a key"
    )
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument(
        "--api-key", help="what clients must send; other users of this machine can read it here, not in FORGE_API_KEY"
    )
    # Without a default, the setting of the engine holds: the parser cannot know it.
    parser.add_argument("--engine", choices=["embedded", "vllm"], default=argparse.SUPPRESS, help="generation engine")
    parser.add_argument("--replicas", type=int, default=1, help="engines that requests are balanced over")
    parser.add_argument("--with-gpus", action="store_true", help="give each engine a GPU")
    parser.add_argument(
        "--slots", type=int, default=argparse.SUPPRESS, help="sequences that one engine decodes at once"
    )
    parser.add_argument("--max-seq-len", type=int, help="prompt and completion together; the model's own if not given")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default=argparse.SUPPRESS, help="of weights and cache"
    )
    parser.add_argument("--record", metavar="FOLDER", help="record the traffic as tokens for forge sft and forge dpo")
    parser.add_argument("--record-gb", type=float, default=10.0, help="recording ends with this size of the folder")
    parser.set_defaults(run=serve)


def serve(args: argparse.Namespace) -> None:
    """Start the engines, then serve until interrupted. SystemExit: an error, in one line."""
    from ..engines import EngineSettings
    from ..engines.weights import load_config
    from ..models.files import try_tokenizer
    from ..models.find import check_family, resolve_model
    from ..runtime.controller import ForgeError, run

    try:
        from ..system.web import bind, required_key

        args.api_key = required_key(args.host, args.api_key)
        # Options that were not given are left to the engine's own defaults.
        names = ("engine", "slots", "max_seq_len", "dtype")
        settings = {name: getattr(args, name) for name in names if hasattr(args, name)}
        engine = EngineSettings(**settings)
        engine.check_installed()
        check_family(args.model)
        model = resolve_model(args.model)
        # Fail before the engines start, which takes a minute.
        if engine.engine == "embedded":
            load_config(Path(model))
        try_tokenizer(Path(model))
        with bind(args.host, args.port) as listener:
            name = args.name or Path(args.model).resolve().name
            run(_serve(args, model, name, _maker(args, model, name), settings, listener))
    except (ForgeError, ValueError, OSError, ImportError) as error:
        raise SystemExit(f"error: {error}") from None


def _maker(args: argparse.Namespace, model: str, name: str) -> MakeServer:
    """The function that makes the server from a service of generators."""
    from ..config.plugin import resolve
    from ..models.tokenizer import open_tokenizer
    from ..serve import Server

    if args.record is not None:
        recorder = resolve("forge_agents.serving:recorder", "--record")
        return recorder(model, name, args.record, args.record_gb, args.api_key)  # type: ignore[no-any-return]
    return partial(Server, tokenizer=open_tokenizer(model), model=name, key=args.api_key)


async def _serve(
    args: argparse.Namespace,
    model: str,
    name: str,
    make: MakeServer,
    settings: dict[str, object],
    listener: socket.socket,
) -> None:
    from ..actors import Generator

    policy = await Generator.options(num_replicas=args.replicas, with_gpus=args.with_gpus).as_service(model, **settings)
    server = make(policy)
    async with server.listen(listener) as address:
        # Clients of Anthropic add more to their base URL than those of OpenAI.
        urls = address if args.record is None else f"{address}/v1 (OpenAI) and {address} (Anthropic)"
        print(f"{name} is served at {urls}", flush=True)
        await asyncio.Event().wait()
