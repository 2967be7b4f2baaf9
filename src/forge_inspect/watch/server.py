"""The server of the page: files below one folder, read as they grow. It writes nothing."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from forge.observability.folder import CONFIG, ENDED, FINISHED, MARK
from forge.observability.rollouts import HELD_OUT, ROLLOUTS
from forge.observability.trace import TRACE
from forge_http.web import Json, guard_requests, serve_application, web
from forge_inspect.alerts import AUDIT, MISMATCH
from forge_inspect.runs import file_signature, list_differences, read_state, summarise_run

from .report import CHARTS, PAGE, SCRIPTS, STYLES
from .views import Fields, RunView, to_json_value

READ = (
    CONFIG,
    MARK,
    ROLLOUTS,
    HELD_OUT,
    TRACE,
    FINISHED,
    ENDED,
    AUDIT,
    MISMATCH,
    "lock",
)  # files of a run's folder that are read
DEPTH = 3  # levels of folders that are searched for runs
MAX_VIEWS = 16  # runs whose numbers are kept in memory
MAX_ERROR = 500  # characters of an error
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
# The page shows texts of rollouts, which are not trusted: it may only send requests to this server.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Watch:
    """The server of a page that shows the runs below the folder `root`.

    Args:
        key: the API key that clients must send; None for none, see `forge_http.web`.
    """

    def __init__(self, root: Path, key: str | None = None) -> None:
        self.root, self.key = root.resolve(), key
        self._views: dict[Path, RunView] = {}  # the most recently used ones at the end
        self._summaries: dict[Path, tuple[object, Fields]] = {}
        # One thread: views are not shared, and the event loop stays free.
        self._thread = ThreadPoolExecutor(1, "forge-watch")

    @asynccontextmanager
    async def listen(self, listener: socket.socket) -> AsyncIterator[str]:
        """Serve on a socket of `forge_http.web.bind_socket` within the block, and yield the address of the page."""
        app = web.Application(middlewares=[_errors_as_json, guard_requests(listener.getsockname()[0], self.key)])
        # The files are read once: they are part of the program, and no path of a request reaches the disk.
        for name in ("index.html", *SCRIPTS, *STYLES, CHARTS):
            kind, body = KINDS[Path(name).suffix], (PAGE / name).read_bytes()
            app.router.add_get("/" if name == "index.html" else f"/{name}", partial(_serve_file, body, kind))

        for path, method in {
            "/api/runs": self._list_runs,
            "/api/run": lambda q: self.view(q["run"]).about(),
            "/api/rows": lambda q: self.view(q["run"]).curves(int(q.get("after", 0))),
            "/api/trace": lambda q: self.view(q["run"]).lanes(int(q.get("after", 0))),
            "/api/rollouts": lambda q: self.view(q["run"]).rollouts(q),
            "/api/held_out": lambda q: to_json_value(self.view(q["run"]).answers.page(q)),
            "/api/rollout": lambda q: self.view(q["run"]).rollout(int(q["row"])),
            "/api/group": lambda q: self.view(q["run"]).group(int(q["row"])),
            "/api/differences": lambda q: to_json_value(
                list_differences([self.folder(name) for name in q.getall("run")])
            ),
        }.items():
            app.router.add_get(path, partial(self._answer_request, method))

        try:
            async with serve_application(app, listener) as url:
                yield url
        finally:
            self._thread.shutdown(wait=False)

    def folder(self, name: str) -> Path:
        """Return the folder of a run by its path below `root`.

        Raises:
            FileNotFoundError: there is no such run, or it is outside of `root`, also by a link.
        """
        path = (self.root / name).resolve()
        if not path.is_relative_to(self.root) or not (path / CONFIG).is_file() or not is_inside(path, self.root):
            raise FileNotFoundError(f"there is no run {name!r}")
        return path

    def view(self, name: str) -> RunView:
        """Return the view of a run by its path below `root`, with all data that is in its files now."""
        folder = self.folder(name)
        view = self._views.pop(folder, None) or RunView(folder)
        view.refresh()
        self._views[folder] = view
        if len(self._views) > MAX_VIEWS:
            self._views.pop(next(iter(self._views)))
        return view

    def _list_runs(self, _: Any) -> list[Fields]:
        """Return an entry for each run below `root`; links are not followed."""
        folders = []
        for folder, subfolders, files in os.walk(self.root):
            path = Path(folder)
            if CONFIG in files and is_inside(path, self.root):
                folders.append(path)
            # `os.walk` does not enter the folders that are removed from this list.
            if CONFIG in files or len(path.relative_to(self.root).parts) == DEPTH:
                subfolders.clear()
        return [
            {"run": (name := str(path.relative_to(self.root))), "name": path.name if name == "." else name}
            | self._summarise_run(path)
            for path in sorted(folders)
        ]

    def _summarise_run(self, path: Path) -> Fields:
        """Return a run's entry in the list, with the state "damaged" if it cannot be read."""
        version = file_signature(path)
        known_version, entry = self._summaries.get(path, (None, {"step": 0}))
        try:
            if known_version != version:
                entry = summarise_run(path)
                json.dumps(entry, allow_nan=False)
            elif entry["state"] != "damaged":
                entry = {**entry, "state": read_state(path)}
        except (ValueError, OSError) as error:
            entry = {"state": "damaged", "step": 0, "error": error_line(error)}
        self._summaries[path] = version, entry
        return entry

    async def _answer_request(self, method: Callable[[Any], Json], request: web.Request) -> web.Response:
        body = await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: json.dumps(method(request.query), allow_nan=False).encode()
        )
        return web.Response(body=body, content_type="application/json", headers=HEADERS)


async def _serve_file(body: bytes, kind: str, _: web.Request) -> web.Response:
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer a request with what `handler` returns, or with {"error": reason} if it raises."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        status, reason = error.status, error.reason
    except (LookupError, ValueError, TypeError, ArithmeticError, RecursionError, OSError, RuntimeError) as error:
        status = 404 if isinstance(error, FileNotFoundError | IndexError) else 400
        reason = f"the query lacks {error}" if isinstance(error, KeyError) else error_line(error)
    return web.json_response({"error": reason}, status=status, headers=HEADERS)


def error_line(error: Exception) -> str:
    """Return the message of an error as one line of at most `MAX_ERROR` characters."""
    return " ".join(str(error).split())[:MAX_ERROR]


def is_inside(folder: Path, root: Path) -> bool:
    """Return whether the files of a run that are read are all below `root`, also if they are links."""
    try:
        return all((folder / name).resolve().is_relative_to(root) for name in READ)
    except (OSError, RuntimeError):  # a link to itself
        return False
