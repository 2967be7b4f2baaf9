"""`python -m forge_envs.openenv package.module:make_environment --port 8000`"""

import argparse
import os
import sys

from aiohttp import web

from forge.plugin import resolve

from .server import web_app


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m forge_envs.openenv", description="Serve an environment to OpenEnv's clients."
    )
    parser.add_argument("make", help="module:name of a callable that makes an environment, such as its class")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-sessions", type=int, default=32)
    parser.add_argument("--idle", type=float, default=600.0, help="seconds after which a session without a call ends")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds in which the environment must answer")
    args = parser.parse_args()
    sys.path.insert(0, os.getcwd())
    try:
        make = resolve(args.make, "environment")
    except ValueError as error:
        parser.error(str(error))
    app = web_app(make, max_sessions=args.max_sessions, idle=args.idle, timeout=args.timeout)
    web.run_app(app, host=args.host, port=args.port, print=None)


if __name__ == "__main__":
    main()
