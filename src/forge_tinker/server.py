"""The HTTP server of the protocol: sessions, models, samplers, and the futures of what they compute."""

import json
import re
import secrets
import time
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic import ValidationError
from tinker import types

from forge_http.web import Handler, answer_constant, guard_requests, json_of, web

from .journal import check_ttl
from .listing import Listing
from .requests import ACTIVE, BINARY, Requests, dump
from .tenants import NotFound, Tenant, Tenants
from .wire import parse_pass

POLL = 30.0  # seconds for which a request for a result waits
MAX_BODY = 1 << 28  # bytes
MAX_COUNT = 4096  # samples of a request, or tokens of a position
PREFIX = "/api/v1"
PROTOBUF = "application/x-protobuf"
# Requests that change or save a model, by their kind.
KINDS: dict[str, Any] = {
    "step": types.OptimStepRequest,
    "save": types.SaveWeightsRequest,
    "sampler": types.SaveWeightsForSamplerRequest,
    "external": types.SaveWeightsExternalRequest,
}
# What a tenant's quotas bound: models in sessions that have not finished, open requests, bytes of checkpoints.
USAGE = {
    "models": "SELECT COUNT(*) FROM models JOIN sessions ON models.session = sessions.id "
    "WHERE models.owner = ? AND sessions.status = ?",
    "open": "SELECT COUNT(*) FROM requests WHERE owner = ? AND result IS NULL AND error IS NULL",
    "bytes": "SELECT COALESCE(SUM(bytes), 0) FROM checkpoints WHERE owner = ?",
}
UNSUPPORTED = {
    "/auth/token": "JWT credentials: use an API key",
    "/create_custom_loss": "custom losses on the server: they run in the client",
    "/audit": "the audit log",
    "/billing/{rest:.*}": "billing",
    "/sessions/{session}/trace_export": "exports of traces",
}


class TinkerServer:
    """The server.

    Args:
        requests: what computes.
        tokenizer: a name or folder from which clients load the tokenizer.
        max_length: of prompt and completion together.
        tenants: by API key; empty: each key is a separate tenant.
    """

    def __init__(self, requests: Requests, tokenizer: str, max_length: int, tenants: Mapping[str, Tenant]) -> None:
        self.requests, self.journal, self.tenants = requests, requests.journal, Tenants(tenants, requests.journal)
        self.tokenizer, self.max_length = tokenizer, max_length

    def make_application(self, host: str) -> web.Application:
        """Return the application for a server that listens at `host`."""
        key = "known" if self.tenants.by_key else None
        guard = guard_requests(host, key, key_of=self.tenants.check_key, content_types=("application/json", PROTOBUF))
        app = web.Application(client_max_size=MAX_BODY, middlewares=[return_errors, guard])
        app.router.add_get(PREFIX + "/healthz", partial(answer_constant, {"status": "ok"}))
        # Clients keep the protocol's defaults; telemetry is dropped; what is drawn already is drawn to its end.
        acknowledge: Any = partial(answer_constant, {"status": "accepted"})
        for path, handler in {
            "/client/config": acknowledge,
            "/client/dynamic_config": acknowledge,
            "/telemetry": acknowledge,
            "/create_session": self._create_session,
            "/session_heartbeat": self._keep_session,
            "/sessions/{session}/finish": self._finish_session,
            "/create_model": self._create_model,
            "/get_info": self._describe_model,
            "/forward_backward": self._accept_pass,
            "/optim_step": self._accept_training("step"),
            "/save_weights": self._accept_training("save"),
            "/save_weights_for_sampler": self._accept_training("sampler"),
            "/save_weights_external": self._accept_training("external"),
            "/load_weights": self._load_weights,
            "/create_sampling_session": self._create_sampler,
            "/join_sampling_session": self._join_sampler,
            "/asample": self._accept_sample,
            "/retrieve_future": self._answer_future,
            "/cancel_future": acknowledge,
        }.items():
            app.router.add_post(PREFIX + path, handler)
        for path in UNSUPPORTED:
            app.router.add_route("*", PREFIX + path, self._reject_unsupported)
        Listing(self.requests, self.tenants, self.max_length).add_routes(app.router, PREFIX)
        return app

    async def _create_session(self, request: web.Request) -> web.Response:
        body = await read_body(request, types.CreateSessionRequest)
        self.journal.remove_old()
        session = uuid.uuid4().hex
        self.journal.add(
            "sessions",
            id=session,
            owner=self.tenants.owner_of(request),
            project=body.project_id or self.tenants.owner_of(request),
            name=body.display_name,
            metadata=body.user_metadata,
            created=time.time(),
            status={"type": "active"},
        )
        return reply(types.CreateSessionResponse(session_id=session))

    def open_session(self, name: Any, request: web.Request) -> Any:
        """Return the row of the caller's session.

        Raises:
            NotFound: there is none.
            HTTPGone: it has finished.
        """
        session = self.tenants.own_row("sessions", name, request)
        if json.loads(session["status"])["type"] != "active":
            raise web.HTTPGone(reason=f"session {name} has finished")
        return session

    async def _keep_session(self, request: web.Request) -> web.Response:
        self.open_session((await read_body(request, types.SessionHeartbeatRequest)).session_id, request)
        return web.json_response({"type": "session_heartbeat"})

    async def _finish_session(self, request: web.Request) -> web.Response:
        name, body = request.match_info["session"], await json_of(request)
        session = self.tenants.own_row("sessions", name, request)
        if json.loads(session["status"])["type"] == "active":
            finished = {"type": "client_finished", "reason": body["reason"], "detail": body.get("detail")}
            self.journal.change("sessions", name, status=finished)
            self.requests.close_session(name)
        return web.json_response(None)

    async def _create_model(self, request: web.Request) -> web.Response:
        body = await read_body(request, types.CreateModelRequest)
        self.check_base(body.base_model)
        if body.lora_config is None:
            raise ValueError("lora_config is missing: adapters are served, full weights are not")
        if body.optimizer_config.type != "adamw":
            raise ValueError(f"optimizer_config: only adamw is served, got {body.optimizer_config.type}")
        config = body.lora_config.model_dump()
        config["seed"] = secrets.randbits(31) if config["seed"] is None else config["seed"]
        return self._add_model(request, body, config, "create", b"{}")

    def check_base(self, name: str | None) -> None:
        """Raise a ValueError if this is not the name of the model that is served."""
        if name is not None and name.split(":")[0] not in (self.requests.name, self.tokenizer):
            raise ValueError(f"base_model {name!r} is not served here: this server has {self.requests.name!r}")

    def _add_model(self, request: web.Request, body: Any, config: Any, kind: str, content: bytes) -> web.Response:
        """Record a new model, and accept its first request."""
        session = self.open_session(body.session_id, request)
        tenant = self.tenants.tenant_of(request)
        model = f"{body.session_id}:train:{body.model_seq_id}"
        is_new = self.journal.find("models", id=model) is None
        count = self.journal.total(USAGE["models"], tenant.project, ACTIVE)
        if is_new and tenant.max_adapters is not None and count >= tenant.max_adapters:
            raise ValueError(f"project {tenant.project} has {count} models, its quota: finish a session of it first")
        now = time.time()
        row = {"session": body.session_id, "owner": tenant.project, "project": session["project"], "config": config}
        self.journal.add("models", id=model, **row, metadata=body.user_metadata, created=now, touched=now)
        return self._accept(request, kind, model, 0, content)

    def _accept(self, request: web.Request, kind: str, subject: str, seq: int, body: bytes) -> web.Response:
        tenant = self.tenants.tenant_of(request)
        if tenant.max_requests is not None and self.journal.total(USAGE["open"], tenant.project) >= tenant.max_requests:
            raise web.HTTPTooManyRequests(reason=f"project {tenant.project} has {tenant.max_requests} open requests")
        name = self.requests.accept(kind, tenant.project, subject, seq, body)
        answer: dict[str, Any] = {"request_id": name}
        if kind == "sample":
            count = types.SampleRequest.model_validate_json(body).num_samples
            answer["sample_sequence_ids"] = [f"{name}:{number}" for number in range(count)]
        else:
            answer["model_id"] = subject
        return web.json_response(answer)

    async def _describe_model(self, request: web.Request) -> web.Response:
        body = await read_body(request, types.GetInfoRequest)
        model = self.tenants.own_row("models", body.model_id, request)
        return reply(
            types.GetInfoResponse(
                model_id=body.model_id,
                model_data=types.ModelData(model_name=self.requests.name, tokenizer_id=self.tokenizer),
                model_name=self.requests.name,
                is_lora=True,
                lora_rank=json.loads(model["config"])["rank"],
                type="get_info",
            )
        )

    async def _accept_pass(self, request: web.Request) -> web.Response:
        content = await request.read()
        # Only the fields that say where the request goes: invalid data are the result's error, not an answer here.
        message = parse_pass(content)
        self.open_session(self.tenants.own_row("models", message.model_id, request)["session"], request)
        return self._accept(request, "pass", message.model_id, message.seq_id, content)

    def _accept_training(self, kind: str) -> Handler:
        """Return the handler of a kind of request that changes or saves a model."""

        async def accept(request: web.Request) -> web.Response:
            body = await read_body(request, KINDS[kind])
            model = self.tenants.own_row("models", body.model_id, request)
            self.open_session(model["session"], request)
            check_ttl(getattr(body, "ttl_seconds", None))
            tenant = self.tenants.tenant_of(request)
            if kind != "step" and tenant.max_bytes is not None:
                used = self.journal.total(USAGE["bytes"], tenant.project)
                if used >= tenant.max_bytes:
                    raise ValueError(f"the project has {used} bytes of checkpoints, its quota: delete some")
            return self._accept(request, kind, model["id"], body.seq_id or 0, await request.read())

        return accept

    async def _load_weights(self, request: web.Request) -> web.Response:
        body = await read_body(request, types.LoadWeightsRequest)
        checkpoint = self.requests.checkpoints.find(body.path, self.tenants.owner_of(request))
        if body.session_id is None:
            model = self.tenants.own_row("models", body.model_id, request)
            self.open_session(model["session"], request)
            return self._accept(request, "load", model["id"], body.seq_id or 0, await request.read())
        self.check_base(body.base_model)
        return self._add_model(request, body, json.loads(checkpoint["config"]), "load", await request.read())

    async def _create_sampler(self, request: web.Request) -> web.Response:
        body = await read_body(request, types.CreateSamplingSessionRequest)
        self.open_session(body.session_id, request)
        folder = None
        if body.model_path is not None:
            self.requests.checkpoints.find(body.model_path, self.tenants.owner_of(request))
            folder = str(self.requests.checkpoints.folder_of(body.model_path))
        else:
            self.check_base(body.base_model)
        sampler = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        self.journal.add(
            "samplers",
            id=sampler,
            session=body.session_id,
            owner=self.tenants.owner_of(request),
            model_path=body.model_path,
            folder=folder,
        )
        return reply(types.CreateSamplingSessionResponse(sampling_session_id=sampler))

    async def _join_sampler(self, request: web.Request) -> web.Response:
        body = await read_body(request, types.JoinSamplingSessionRequest)
        sampler = self.tenants.own_row("samplers", body.sampling_session_id, request)
        self.journal.change("samplers", sampler["id"], clients=sampler["clients"] + 1)
        return reply(types.JoinSamplingSessionResponse(client_counter=sampler["clients"] + 1))

    async def _accept_sample(self, request: web.Request) -> web.Response:
        body = await read_body(request, types.SampleRequest)
        if body.sampling_session_id is None or body.seq_id is None:
            raise ValueError("sampling_session_id and seq_id are missing")
        if max(body.num_samples, body.topk_prompt_logprobs, body.prompt_alt_tokens_k) > MAX_COUNT:
            raise ValueError(f"num_samples, topk_prompt_logprobs and prompt_alt_tokens_k are at most {MAX_COUNT}")
        sampler = self.tenants.own_row("samplers", body.sampling_session_id, request)
        self.open_session(sampler["session"], request)
        return self._accept(request, "sample", sampler["id"], body.seq_id, await request.read())

    async def _answer_future(self, request: web.Request) -> web.Response:
        body = await read_body(request, types.FutureRetrieveRequest)
        try:
            row = await self.requests.wait(body.request_id, self.tenants.owner_of(request), POLL)
        except KeyError:
            raise web.HTTPGone(reason=f"there is no request {body.request_id}, or its result was dropped") from None
        if row is None:
            return web.json_response({"type": "try_again", "queue_state": "active"}, status=408)
        if row["error"] is not None:
            return web.json_response(json.loads(row["error"]))
        return web.Response(body=row["result"], content_type=PROTOBUF if row["kind"] in BINARY else "application/json")

    async def _reject_unsupported(self, request: web.Request) -> web.Response:
        path = re.sub(f"^{PREFIX}", "", request.match_info.route.resource.canonical)  # type: ignore[union-attr]
        raise NotFound(f"forge tinker does not support {UNSUPPORTED.get(path, path)}")


@web.middleware
async def return_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors of requests as the protocol does: a status, and a JSON object with what to do."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return web.json_response({"detail": error.reason}, status=error.status)
    except (ValueError, KeyError, TypeError) as error:
        status = 404 if isinstance(error, NotFound) else 422
        return web.json_response({"detail": " ".join(str(error).split())}, status=status)


async def read_body(request: web.Request, model: Any) -> Any:
    """Return the JSON body of a request as a type of the protocol.

    Raises:
        ValueError: it is invalid; names the first field that is.
    """
    try:
        return model.model_validate(await json_of(request))
    except ValidationError as error:
        fault = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}") from None


def reply(response: Any) -> web.Response:
    """Return a response of the protocol."""
    return web.Response(body=dump(response), content_type="application/json")
