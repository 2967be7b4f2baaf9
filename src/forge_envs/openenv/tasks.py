"""Tasks that a server lists by split and number: the Task API of OpenEnv 0.10.

A task is chosen by the parameters of a reset: `split` and `index`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from ..content import Json

KINDS = ("train", "validation", "test")  # of a split; another name is a validation split
TaskSets = Mapping[str, Sequence[Json]]  # tasks by split
Answer = Callable[[web.Request], Awaitable[web.Response]]


class TaskLists:
    """The tasks of a served environment.

    Args:
        name: of the environment, as clients write it in the path.
        sets: its tasks by split; None: it has no lists, which is status 501.
    """

    def __init__(self, name: str, sets: TaskSets | None) -> None:
        self.name = name
        self._sets = sets

    def routes(self) -> list[web.RouteDef]:
        """Routes of the Task API."""
        return [
            web.get("/list_environments", self._names),
            web.get("/{environment}/splits", self._answered(self._splits)),
            web.post("/{environment}/tasks", self._answered(self._tasks)),
            web.post("/{environment}/num_tasks", self._answered(self._number)),
            web.post("/{environment}/task", self._answered(self._task)),
            web.post("/{environment}/task_range", self._answered(self._range)),
        ]

    def task(self, parameters: Mapping[str, Json]) -> Json:
        """The task that a reset asks for. ValueError: there is none of this split and index."""
        tasks = self._of(parameters)
        index = parameters.get("index")
        if not isinstance(index, int) or isinstance(index, bool):
            raise ValueError(f"index must be an integer, got {index!r}")
        if not 0 <= index < len(tasks):
            raise ValueError(f"index must be from 0 to {len(tasks) - 1}, got {index}")
        return tasks[index]

    def has(self, parameters: Mapping[str, Json]) -> bool:
        """Whether a reset's parameters choose one of the tasks."""
        return self._sets is not None and parameters.keys() == {"split", "index"}

    def _of(self, parameters: Mapping[str, Json]) -> Sequence[Json]:
        split = parameters.get("split")
        sets = self._sets or {}
        if not isinstance(split, str) or split not in sets:
            raise ValueError(f"unknown split {split!r}: there are {', '.join(sets)}")
        return sets[split]

    async def _names(self, _: web.Request) -> web.Response:
        return web.json_response([self.name])

    def _answered(self, content: Callable[[Mapping[str, Json]], Any]) -> Answer:
        async def answer(request: web.Request) -> web.Response:
            if request.match_info["environment"].lower() != self.name.lower():
                detail = f"unknown environment {request.match_info['environment']!r}"
                return web.json_response({"detail": detail}, status=404)
            if self._sets is None:
                return web.json_response({"detail": "this environment lists no tasks"}, status=501)
            try:
                body = await request.json() if request.method == "POST" else {}
                if not isinstance(body, dict):
                    raise ValueError("the request must be a JSON object")
                return web.json_response(content(body))
            except ValueError as error:
                return web.json_response({"detail": str(error)}, status=400)

        return answer

    def _splits(self, _: Mapping[str, Json]) -> Any:
        return [{"name": name, "type": name if name in KINDS else "validation"} for name in self._sets or {}]

    def _tasks(self, body: Mapping[str, Json]) -> Any:
        return {"tasks": list(self._of(body)), "env_name": self.name}

    def _number(self, body: Mapping[str, Json]) -> Any:
        return {"num_tasks": len(self._of(body))}

    def _task(self, body: Mapping[str, Json]) -> Any:
        return {"task": self.task(body)}

    def _range(self, body: Mapping[str, Json]) -> Any:
        bounds = [body.get(name) for name in ("start", "stop")]
        if any(bound is not None and (not isinstance(bound, int) or isinstance(bound, bool)) for bound in bounds):
            raise ValueError("start and stop must be integers or null")
        return {"tasks": list(self._of(body)[slice(*bounds)])}
