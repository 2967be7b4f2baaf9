"""`forge serve MODEL`: serves a model with the APIs of OpenAI and Anthropic."""

import argparse
import asyncio
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from forge.cli.subparsers import Option, Subparsers, add_command

ENGINE_OPTIONS = {
    "engine": "embedded or vllm",
    "slots": "sequences that one engine decodes at once",
    "max_seq_len": "prompt and completion together; the model's own if not given",
    "dtype": "float32 or bfloat16, of weights and cache",
}


def add_to(commands: Subparsers) -> None:
    """Add the command `forge serve` to the subparsers `commands`."""
    options: list[Option] = [
        ("model", {"help": "folder or hub id; runs/x/model is what a run leaves behind"}),
        ("--name", {"help": "what clients call the model; its folder's name if not given"}),
        ("--host", {"default": "127.0.0.1", "help": "address to listen at; other machines' clients need a key"}),
        ("--port", {"type": int, "default": 8000, "help": "0 takes a free one"}),
        (
            "--api-key",
            {"help": "what clients must send; other users of this machine can read it here, not in FORGE_API_KEY"},
        ),
        ("--replicas", {"type": int, "default": 1, "help": "engines that requests are balanced over"}),
        ("--with-gpus", {"action": "store_true", "help": "give each engine a GPU"}),
    ]
    # SUPPRESS: an option that is not given is not passed on, and the engine's default applies.
    for name, about in ENGINE_OPTIONS.items():
        kind = int if name in ("slots", "max_seq_len") else str
        options.append((f"--{name.replace('_', '-')}", {"type": kind, "default": argparse.SUPPRESS, "help": about}))

    description = (
        "Serve a model to clients of OpenAI and Anthropic until it is interrupted: chat, responses, messages and "
        "completions, streaming, log-probabilities."
    )
    add_command(
        commands,
        "serve",
        "serve a model to OpenAI clients",
        "runs/quickstart/model --port 8000",
        serve_model,
        options,
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )


def serve_model(args: argparse.Namespace) -> None:
    """Start the engines, then serve until interrupted.

    Raises:
        SystemExit: an option is invalid, the model or an engine cannot be started; the message is one line.
    """
    # Imported here: they take seconds, which other commands need not wait.
    from forge.runtime.controller import ForgeError, run

    # All settings are checked before the engines start, which takes a minute.
    try:
        from forge_http.web import bind_socket, required_key  # isort: skip (it names a missing package with its fix)
        from forge.engines import EngineSettings
        from forge.models.architecture import max_length
        from forge.models.find import check_family, resolve_model
        from forge.models.tokenizer import model_config, open_tokenizer

        from .server import ModelServer

        key = required_key(args.host, args.api_key)
        options = {name: getattr(args, name) for name in ENGINE_OPTIONS if hasattr(args, name)}
        EngineSettings(**options).check_installed()
        check_family(args.model)
        model = resolve_model(args.model)
        tokenizer = open_tokenizer(model)
        name = args.name or Path(args.model).resolve().name
        longest = options.get("max_seq_len") or max_length(model_config(model))
        make_server = partial(ModelServer, tokenizer=tokenizer, name=name, key=key, longest=longest)
        with bind_socket(args.host, args.port) as listener:
            run(_serve_policy(args, model, name, make_server, options, listener))
    except (ForgeError, ValueError, OSError, ImportError) as error:
        raise SystemExit(f"error: {error}") from None


async def _serve_policy(
    args: argparse.Namespace,
    model: str,
    name: str,
    make_server: Callable[[Any], Any],  # a ModelServer, by its policy
    options: dict[str, object],
    listener: socket.socket,
) -> None:
    from forge.actors import Generator
    from forge.runtime.controller.home import private_folder
    from forge.system.scratch import remove_tree

    policy = await Generator.options(num_replicas=args.replicas, with_gpus=args.with_gpus).as_service(model, **options)
    async with make_server(policy).listen(listener) as url:
        # Anthropic's clients add /v1 to their base URL, OpenAI's do not.
        print(f"{name} is served at {url}/v1 (OpenAI) and {url} (Anthropic)", flush=True)
        signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
        number = await signals.get()
    # Nothing has to be saved: the engines end with this process, and to stop them one by one would take seconds.
    print(f"forge: {number.name}: ended", flush=True)
    remove_tree(private_folder())
    os._exit(128 + number)
