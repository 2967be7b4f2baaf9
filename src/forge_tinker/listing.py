"""What the protocol's REST client lists and changes: training runs, checkpoints, samplers and sessions."""

import hmac
import json
import secrets
import shutil
import time
import uuid
from typing import Any

from tinker import types

from forge_http.web import json_of, web

from .journal import check_ttl, describe_checkpoint, from_json, to_time
from .requests import Requests
from .tenants import Tenants


class Listing:
    """The handlers of these requests.

    Args:
        requests: whose tables are listed.
        max_length: tokens of prompt and completion together.
    """

    def __init__(self, requests: Requests, tenants: Tenants, max_length: int) -> None:
        self.name, self.checkpoints, self.journal = requests.name, requests.checkpoints, requests.journal
        self.tenants, self.max_length = tenants, max_length
        self._secret = secrets.token_bytes(16)  # signs links to files, which end with the server

    def add_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        """Add the handlers to a router, at paths that start with `prefix`."""
        self._prefix = prefix
        checkpoint = "/training_runs/{run}/checkpoints/{segment}/{name}"
        for method, path, handler in (
            ("GET", "/get_server_capabilities", self._list_capabilities),
            ("GET", "/training_runs", self._list_runs),
            ("GET", "/training_runs/{run}", self._show_run),
            ("GET", "/training_runs/{run}/checkpoints", self._list_run_checkpoints),
            ("DELETE", checkpoint, self._delete_checkpoint),
            ("POST", checkpoint + "/publish", self._publish),
            ("DELETE", checkpoint + "/publish", self._publish),
            ("PUT", checkpoint + "/ttl", self._set_ttl),
            ("GET", checkpoint + "/external_weights_urls", self._link_files),
            ("GET", "/files/{signature}/{expires}/{run}/{segment}/{name}/{file}", self._send_file),
            ("GET", "/checkpoints", self._list_checkpoints),
            ("POST", "/weights_info", self._show_weights),
            ("POST", "/copy_weights", self._copy_weights),
            ("GET", "/samplers/{sampler}", self._show_sampler),
            ("GET", "/sessions", self._list_sessions),
            ("POST", "/sessions/search", self._search_sessions),
            ("GET", "/sessions/{session}", self._show_session),
            ("PUT", "/sessions/{session}/project", self._move_session),
        ):
            router.add_route(method, prefix + path, handler)

    def _own_checkpoint(self, request: web.Request) -> Any:
        """Return the row of the checkpoint of a request's path, which must be the caller's."""
        names = request.match_info
        path = f"tinker://{names['run']}/{names['segment']}/{names['name']}"
        return self.checkpoints.find(path, self.tenants.owner_of(request), own=True)

    async def _list_capabilities(self, _: web.Request) -> web.Response:
        model = {"model_name": self.name, "max_context_length": self.max_length, "trainable": True, "sampleable": True}
        return web.json_response({"supported_models": [model]})

    def _describe_run(self, row: Any) -> dict[str, Any]:
        checkpoints = [describe_checkpoint(c) for c in self.journal.select("checkpoints", model=row["id"])]
        latest = {c["checkpoint_type"]: c for c in checkpoints}
        return {
            "training_run_id": row["id"],
            "base_model": self.name,
            "model_owner": row["owner"],
            "is_lora": True,
            "lora_rank": (from_json(row["config"]) or {}).get("rank"),
            "last_request_time": to_time(row["touched"]),
            "last_checkpoint": latest.get("training"),
            "last_sampler_checkpoint": latest.get("sampler"),
            "user_metadata": from_json(row["metadata"]),
        }

    async def _list_runs(self, request: web.Request) -> web.Response:
        wanted = {"owner": self.tenants.owner_of(request)}
        if project := request.query.get("project_id"):
            wanted["project"] = project
        rows, cursor = take_page(self.journal.select("models", "created DESC", **wanted), request)
        return web.json_response({"training_runs": [self._describe_run(row) for row in rows], "cursor": cursor})

    async def _show_run(self, request: web.Request) -> web.Response:
        return web.json_response(self._describe_run(self.tenants.own_row("models", request.match_info["run"], request)))

    async def _list_run_checkpoints(self, request: web.Request) -> web.Response:
        self.checkpoints.remove_expired()
        run = self.tenants.own_row("models", request.match_info["run"], request)
        rows = self.journal.select("checkpoints", model=run["id"])
        return web.json_response({"checkpoints": [describe_checkpoint(row) for row in rows]})

    async def _list_checkpoints(self, request: web.Request) -> web.Response:
        self.checkpoints.remove_expired()
        rows = self.journal.select("checkpoints", "created DESC", owner=self.tenants.owner_of(request))
        rows, cursor = take_page(rows, request)
        return web.json_response({"checkpoints": [describe_checkpoint(row) for row in rows], "cursor": cursor})

    async def _delete_checkpoint(self, request: web.Request) -> web.Response:
        self.checkpoints.remove(self._own_checkpoint(request)["path"])
        return web.json_response(None)

    async def _publish(self, request: web.Request) -> web.Response:
        self.journal.change("checkpoints", self._own_checkpoint(request)["path"], public=int(request.method == "POST"))
        return web.json_response(None)

    async def _set_ttl(self, request: web.Request) -> web.Response:
        seconds = (await json_of(request)).get("ttl_seconds")
        check_ttl(seconds)
        expires = None if seconds is None else time.time() + seconds
        self.journal.change("checkpoints", self._own_checkpoint(request)["path"], expires=expires)
        return web.json_response(None)

    async def _link_files(self, request: web.Request) -> web.Response:
        path = self._own_checkpoint(request)["path"]
        expires = int(time.time()) + 3600
        files = sorted(file.name for file in self.checkpoints.folder_of(path).iterdir())
        address = f"{request.scheme}://{request.host}{self._prefix}/files"
        rest = {name: f"{expires}/{path.removeprefix('tinker://')}/{name}" for name in files}
        urls = {name: f"{address}/{self._sign(tail)}/{tail}" for name, tail in rest.items()}
        return web.json_response({"urls": urls, "expires": to_time(expires)})

    def _sign(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), "sha256").hexdigest()

    async def _send_file(self, request: web.Request) -> web.StreamResponse:
        names = request.match_info
        run = "/".join(names[part] for part in ("run", "segment", "name"))
        signature = self._sign(f"{names['expires']}/{run}/{names['file']}")
        if not hmac.compare_digest(signature, names["signature"]) or int(names["expires"]) < time.time():
            raise web.HTTPForbidden(reason="the link is invalid, or its time is over: ask for another one")
        return web.FileResponse(self.checkpoints.folder_of(f"tinker://{run}") / names["file"])

    async def _show_weights(self, request: web.Request) -> web.Response:
        path = (await json_of(request)).get("tinker_path")
        config = from_json(self.checkpoints.find(path, self.tenants.owner_of(request))["config"])
        layers = {name: config[name] for name in ("train_unembed", "train_mlp", "train_attn")}
        return web.json_response({"base_model": self.name, "is_lora": True, "lora_rank": config["rank"], **layers})

    async def _copy_weights(self, request: web.Request) -> web.Response:
        body = types.CopyWeightsRequest.model_validate(await json_of(request))
        check_ttl(body.ttl_seconds)
        owner = self.tenants.owner_of(request)
        source = self.checkpoints.find(body.source_path, owner)
        if body.session_id is not None:
            self.tenants.own_row("sessions", body.session_id, request)
        # A repeated request, whose answer was lost, gives the same copy.
        key = request.headers.get("X-Idempotency-Key") or uuid.uuid4().hex
        session = body.session_id or uuid.uuid5(uuid.NAMESPACE_URL, f"{owner} {key}").hex
        model = f"{session}:train:{body.model_seq_id or 0}"
        segment, name = source["path"].split("/")[3:]
        path = f"tinker://{model}/{segment}/{name}"
        if self.journal.find("checkpoints", path=path) is None:
            folder = self.checkpoints.folder_of(path)
            shutil.copytree(self.checkpoints.folder_of(source["path"]), folder, dirs_exist_ok=True)
            now, config = time.time(), from_json(source["config"])
            self.journal.add(
                "models",
                id=model,
                session=session,
                owner=owner,
                project=body.destination_project_id or owner,
                config=config,
                created=now,
                touched=now,
            )
            settings = {"ttl_seconds": body.ttl_seconds, "user_metadata": from_json(source["metadata"])}
            self.checkpoints.record(path, model, owner, config, source["bytes"], settings)
        return web.json_response({"tinker_path": path})

    async def _show_sampler(self, request: web.Request) -> web.Response:
        row = self.tenants.own_row("samplers", request.match_info["sampler"], request)
        return web.json_response({"sampler_id": row["id"], "base_model": self.name, "model_path": row["model_path"]})

    async def _list_sessions(self, request: web.Request) -> web.Response:
        rows, _ = take_page(
            self.journal.select("sessions", "created DESC", owner=self.tenants.owner_of(request)), request
        )
        return web.json_response({"sessions": [row["id"] for row in rows]})

    async def _show_session(self, request: web.Request) -> web.Response:
        row = self.tenants.own_row("sessions", request.match_info["session"], request)
        return web.json_response(
            {
                "training_run_ids": [model["id"] for model in self.journal.select("models", session=row["id"])],
                "sampler_ids": [sampler["id"] for sampler in self.journal.select("samplers", session=row["id"])],
                "user_metadata": from_json(row["metadata"]),
                "display_name": row["name"],
            }
        )

    async def _move_session(self, request: web.Request) -> web.Response:
        row = self.tenants.own_row("sessions", request.match_info["session"], request)
        self.journal.change("sessions", row["id"], project=(await json_of(request))["project_id"])
        return web.json_response(None)

    async def _search_sessions(self, request: web.Request) -> web.Response:
        wanted = types.SessionSearchRequest.model_validate(await json_of(request))
        rows = [
            row
            for row in self.journal.select("sessions", "created DESC, id DESC", owner=self.tenants.owner_of(request))
            if is_wanted(row, wanted)
        ]
        if wanted.cursor is not None:
            last = wanted.cursor.last_created_at.timestamp(), wanted.cursor.last_session_id
            rows = [row for row in rows if (row["created"], row["id"]) < last]
        page = rows[: wanted.limit]
        following = None
        if len(rows) > len(page):
            following = {"last_created_at": to_time(page[-1]["created"]), "last_session_id": page[-1]["id"]}
        return web.json_response({"sessions": list(map(self._summarize_session, page)), "next_cursor": following})

    def _summarize_session(self, row: Any) -> dict[str, Any]:
        models = [model["id"] for model in self.journal.select("models", session=row["id"])]
        checkpoints = [c for model in models for c in self.journal.select("checkpoints", model=model)]
        return {
            "session_id": row["id"],
            "created_at": to_time(row["created"]),
            "owner": row["owner"],
            "project_id": row["project"],
            "status": json.loads(row["status"]),
            "checkpoints_count": len(checkpoints),
            "display_name": row["name"],
            "user_metadata": from_json(row["metadata"]),
            "checkpoint_storage_bytes": sum(c["bytes"] for c in checkpoints),
        }


def is_wanted(row: Any, wanted: Any) -> bool:
    """Return whether a session matches a `SessionSearchRequest`."""
    words = (wanted.display_name or "").lower().split()
    matches = [wanted.session_id == row["id"]] if wanted.session_id else []
    if words:
        matches.append(all(word in (row["name"] or "").lower() for word in words))
    metadata = from_json(row["metadata"]) or {}
    status = json.loads(row["status"])["type"]
    return (
        (not matches or any(matches))
        and (wanted.project_ids is None or row["project"] in wanted.project_ids)
        and all(metadata.get(key) == value for key, value in wanted.user_metadata.items())
        and (wanted.statuses is None or status in [query.type for query in wanted.statuses])
    )


def take_page(rows: list[Any], request: web.Request) -> tuple[list[Any], dict[str, int]]:
    """Return the page of rows that a request's `offset` and `limit` name, and the cursor of the answer.

    Raises:
        ValueError: one of them is not a whole number.
    """
    offset, limit = (int(request.query.get(name, default)) for name, default in (("offset", 0), ("limit", 100)))
    return rows[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(rows)}
