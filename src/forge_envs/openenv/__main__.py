"""Command that serves an environment: `python -m forge_envs.openenv package.module:make_environment --port 8000`."""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable

from forge.config.plugin import resolve
from forge.envs.environment import Environment

from .server import serve


def main() -> None:
    """Serve the environment that the command line names, until interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m forge_envs.openenv", description="Serve an environment to OpenEnv's clients."
    )
    parser.add_argument("make", help="module:name of a callable that makes an environment, such as its class")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument(
        "--api-key", dest="key", help="what clients must send; better in FORGE_API_KEY, which is private"
    )
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-sessions", type=int, default=32)
    parser.add_argument("--idle", type=float, default=600.0, help="seconds after which a session without a call ends")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds in which the environment must answer")
    args = parser.parse_args()
    # The environment is most often a file in the working directory.
    sys.path.insert(0, os.getcwd())
    try:
        make = resolve(args.make, "environment")
    except ValueError as error:
        parser.error(str(error))
    try:
        asyncio.run(_serve(make, args))
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


async def _serve(make: Callable[[], Environment], args: argparse.Namespace) -> None:
    settings = {name: getattr(args, name) for name in ("host", "port", "key", "max_sessions", "idle", "timeout")}
    async with serve(make, **settings):
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await stop.wait()


if __name__ == "__main__":
    main()
