"""Requests of the protocol that compute: accepted in any order, executed in the order of each model, never twice."""

import asyncio
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tinker import types

from .adapters import Adapter
from .journal import Checkpoints, Journal, from_json
from .learner import Learner
from .sampler import Sampler
from .wire import Datum, Scores, make_sampling, parse_pass, read_pass, read_targets, write_samples

log = logging.getLogger(f"forge.{__name__}")
STEPS = 8  # optimiser steps between two snapshots of a model: a restarted server computes the requests since again
SAMPLERS = 32  # samplers without a name whose weights a session keeps
ACTIVE = '{"type": "active"}'  # status of a session
BINARY = ("pass", "sample")  # kinds of requests whose results are protobuf messages


class Requests:
    """The models of all tenants, and what they are asked to compute.

    Args:
        folder: of the server; what is in it survives.
        name: of the base model.
    """

    def __init__(self, folder: Path, name: str, journal: Journal, learner: Learner, sampler: Sampler) -> None:
        self.folder, self.name = folder, name
        self.journal, self.learner, self.sampler = journal, learner, sampler
        self.checkpoints = Checkpoints(folder, journal)
        self.thread = ThreadPoolExecutor(1, "forge-tinker")
        self.adapters: dict[str, Adapter] = {}
        self._next: dict[str, int] = {}  # of each model, the number of the request to execute next
        self._steps: dict[str, int] = {}  # of each model, optimiser steps since its snapshot
        self._running: dict[str, asyncio.Task[None]] = {}
        self._finished: dict[str, asyncio.Event] = {}  # of each request that somebody waits for

    def resume(self) -> None:
        """Continue with what a killed server had accepted."""
        for request in self.journal.select("requests", result=None, error=None):
            if request["kind"] == "sample":
                self._start_sample(request["id"])
            else:
                self._start_model(request["subject"])

    def close_session(self, session: str) -> None:
        """Free what only a session uses: its models' memory, and weights of samplers that have no name."""
        for model in self.journal.select("models", session=session):
            self.adapters.pop(model["id"], None)
        for folder in (self.folder / "samplers").glob(f"{session}-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def accept(self, kind: str, owner: str, subject: str, seq: int, body: bytes) -> str:
        """Accept request number `seq` of a model or a sampler, and return its id. A repeated one is the same request.

        Args:
            kind: create, load, pass, step, save, sampler, external or sample.
            subject: id of the model or sampler.
        """
        name = f"{subject}:{seq}"
        row = {"id": name, "owner": owner, "subject": subject, "seq": seq, "kind": kind, "body": body}
        if self.journal.add("requests", **row, created=time.time()):
            if kind == "sample":
                self._start_sample(name)
            else:
                self.journal.change("models", subject, touched=time.time())
                self._start_model(subject)
        return name

    async def wait(self, name: str, owner: str, seconds: float) -> Any:
        """Return the row of a finished request; None if it is not finished within this time.

        Raises:
            KeyError: this owner has no such request.
        """
        if (row := self.journal.find("requests", id=name, owner=owner)) is None:
            raise KeyError(name)
        if is_open(row):
            event = self._finished.setdefault(name, asyncio.Event())
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await event.wait()
            row = self.journal.find("requests", id=name)
        return None if is_open(row) else row

    async def _settle(self, row: Any, work: Awaitable[bytes]) -> None:
        """Record the result of a request, or its error, unless it is known from before a restart."""
        try:
            changes: dict[str, Any] = {"result": await work}
        except Exception as error:
            is_user = isinstance(error, ValueError | OSError)
            if not is_user:
                log.error("request %s failed", row["id"], exc_info=error)
            text = " ".join(str(error).split()) if is_user else f"{type(error).__name__}: {error}"
            changes = {"error": {"error": text, "category": "user" if is_user else "server"}}

        if is_open(row):
            self.journal.change("requests", row["id"], **changes)
        if event := self._finished.pop(row["id"], None):
            event.set()

    async def _run_in_thread(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.thread, partial(work, *args, **kwargs))

    def _start_model(self, model: str) -> None:
        if model not in self._running or self._running[model].done():
            self._running[model] = asyncio.get_running_loop().create_task(self._run_model(model))

    async def _run_model(self, model: str) -> None:
        """Execute a model's requests in order, as far as they have arrived."""
        if model not in self._next:
            known = self.journal.find("models", id=model)
            self._next[model] = known["applied"] + 1
            try:
                await self._run_in_thread(self._restore, known)
            except (OSError, ValueError) as fault:  # its requests fail, one by one
                log.error("the snapshot of model %s cannot be read: %s", model, fault)
        while (row := self.journal.find("requests", subject=model, seq=self._next[model])) is not None:
            # What changed the model before a restart is computed again; its result is known.
            if is_open(row) or row["kind"] in ("create", "load", "pass", "step"):
                await self._settle(row, self._execute(row))
                await self._take_snapshot(row)
            self._next[model] = row["seq"] + 1

    def _restore(self, known: Any) -> None:
        """Read a model's snapshot, which has the requests up to number `applied`; -1: there is none."""
        if known["applied"] >= 0:
            adapter = self.learner.create(from_json(known["config"]))
            adapter.load(self._snapshot_folder(known["id"], known["applied"]), optimizer=True)
            self.adapters[known["id"]] = adapter

    def _snapshot_folder(self, model: str, seq: int) -> Path:
        return self.folder / "models" / model.replace(":", "-") / f"snapshot-{seq}"

    async def _take_snapshot(self, row: Any) -> None:
        """Write a snapshot after every few steps and after a load; gradients are 0 at both."""
        model, seq = row["subject"], row["seq"]
        if row["kind"] == "step":
            self._steps[model] = self._steps.get(model, 0) + 1
        is_due = row["kind"] == "load" or (row["kind"] == "step" and self._steps[model] >= STEPS)
        if not is_due or model not in self.adapters:
            return

        folder = self._snapshot_folder(model, seq)
        await self._run_in_thread(self.adapters[model].save, folder, self.name, optimizer=True)
        self.journal.forget_bodies(model, seq)
        self._steps[model] = 0
        for other in folder.parent.glob("snapshot-*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)

    async def _execute(self, row: Any) -> bytes:
        """Execute a request of a model, and return the result's bytes."""
        model, owner = row["subject"], row["owner"]
        if row["kind"] == "pass":
            message = parse_pass(row["body"])
            data, config = read_pass(message)
            if message.loss_fn == "stable_reinforce":
                for datum in data:
                    self._add_recorded(datum, model.partition(":")[0])
            adapter = self._adapter_of(model)
            return await self._run_in_thread(
                self.learner.run_pass, adapter, message.loss_fn, data, config, forward_only=message.forward_only
            )

        body = json.loads(row["body"])
        config = from_json(self.journal.find("models", id=model)["config"])
        if row["kind"] == "create":
            self.adapters[model] = await self._run_in_thread(self.learner.create, config)
            return dump(types.CreateModelResponse(model_id=model))
        if row["kind"] == "step":
            adapter = self._adapter_of(model)
            if "adam_params" not in body:
                raise ValueError("only AdamW is served: pass AdamParams to optim_step")
            settings = types.AdamParams.model_validate(body["adam_params"]).model_dump()
            return dump(types.OptimStepResponse(metrics=await self._run_in_thread(adapter.step, settings)))
        if row["kind"] == "load":
            return await self._load(model, owner, body)
        return await self._save(row["kind"], model, owner, body, config)

    def _adapter_of(self, model: str) -> Adapter:
        if model not in self.adapters:
            raise ValueError(f"model {model} could not be created or read: see its first error, or the server's log")
        return self.adapters[model]

    async def _load(self, model: str, owner: str, body: dict[str, Any]) -> bytes:
        request = types.LoadWeightsRequest.model_validate(body)
        checkpoint = self.checkpoints.find(request.path, owner)
        if model not in self.adapters:
            config = from_json(checkpoint["config"])
            self.journal.change("models", model, config=config)
            self.adapters[model] = self.learner.create(config)
        folder = self.checkpoints.folder_of(request.path)
        await self._run_in_thread(self.adapters[model].load, folder, optimizer=request.optimizer)
        return dump(types.LoadWeightsResponse(path=request.path, model_id=model))

    async def _save(self, kind: str, model: str, owner: str, body: dict[str, Any], config: Any) -> bytes:
        adapter = self._adapter_of(model)
        # A sampler without a name has a separate folder, and no path.
        if kind == "sampler" and body.get("path") is None:
            session = model.partition(":")[0]
            sampler = f"{session}:sample:{body['sampling_session_seq_id']}"
            folder = self.folder / "samplers" / sampler.replace(":", "-")
            await self._run_in_thread(adapter.save, folder, self.name, optimizer=False)
            # Of a session's samplers without a name only the weights of those that were used last are kept.
            folders = (self.folder / "samplers").glob(f"{session}-*")
            for unused in sorted(folders, key=lambda folder: folder.stat().st_mtime)[:-SAMPLERS]:
                shutil.rmtree(unused, ignore_errors=True)
            mode = {"model": model, "kind": body.get("kind", "snapshot")}
            self.journal.add("samplers", id=sampler, session=session, owner=owner, folder=str(folder), **mode)
            # All samplers in flight of a model draw by its newest weights.
            for other in self.journal.select("samplers", **mode) if mode["kind"] == "inflight" else ():
                self.journal.change("samplers", other["id"], folder=str(folder))
            return dump(types.SaveWeightsForSamplerResponseInternal(sampling_session_id=sampler))

        path = self.checkpoints.make_path(model, kind, str(body.get("path")), overwrite=bool(body.get("overwrite")))
        folder = self.checkpoints.folder_of(path)
        size = await self._run_in_thread(adapter.save, folder, self.name, optimizer=kind == "save")
        self.checkpoints.record(path, model, owner, config, size, body)
        self.learner.open.cache_clear()  # the folder may have been overwritten
        self.sampler.forget(folder)
        if kind == "save":
            return dump(types.SaveWeightsResponse(path=path))
        return json.dumps({"path": path}).encode()

    def _add_recorded(self, datum: Datum, session: str) -> None:
        """Add what was recorded when the targets of a datum were sampled: their log-probabilities, and which are.

        Raises:
            ValueError: the datum has no provenance, or names a sequence that this session has not recorded.
        """
        if not datum.spans:
            raise ValueError("stable_reinforce needs data with provenance: Datum.with_provenance")
        lengths = [length for *_, length in datum.spans]
        if min(lengths) < 0 or sum(lengths) != len(datum.tokens):
            raise ValueError("the provenance of loss_fn_inputs does not cover all targets")
        logprobs, sampled = [], []
        for sequence, offset, length in datum.spans:
            values = np.zeros(length, np.float32)
            if sequence:
                if (row := self.journal.find("sequences", id=sequence, session=session)) is None:
                    raise ValueError(
                        f"sequence {sequence} was not recorded in this session within a day: sample with "
                        "record_stability_info=True"
                    )
                recorded = np.frombuffer(row["logprobs"], np.float32)[offset : offset + length]
                values[: len(recorded)] = recorded
            logprobs.append(values)
            sampled.append(np.full(length, float(bool(sequence)), np.float32))
        datum.inputs["logprobs"], datum.inputs["sampled"] = np.concatenate(logprobs), np.concatenate(sampled)

    def _start_sample(self, name: str) -> None:
        row = self.journal.find("requests", id=name)
        self._running[name] = asyncio.get_running_loop().create_task(self._settle(row, self._sample(row)))
        self._running[name].add_done_callback(lambda _: self._running.pop(name, None))

    async def _sample(self, row: Any) -> bytes:
        request = types.SampleRequest.model_validate_json(row["body"])
        sampler = self.journal.find("samplers", id=row["subject"])
        folder = None if sampler["folder"] is None else Path(sampler["folder"])
        if folder is not None:
            if not folder.exists():
                raise ValueError("the weights of this sampler were deleted, or others were used since: save them again")
            os.utime(folder)
        prompt = request.prompt.to_ints()
        self.learner.check_tokens(prompt, "prompt")
        # The same request draws the same tokens again after a restart.
        seed = request.sampling_params.seed
        seed = zlib.crc32(row["id"].encode()) if seed is None else seed % 2**63
        sampling = make_sampling(request, seed, self.sampler.engine.max_seq_len - len(prompt))
        completions = await self.sampler.sample(folder, prompt, sampling)

        if request.record_stability_info:
            for number, completion in enumerate(completions):
                recorded = np.asarray(completion.logprobs, np.float32).tobytes()
                self.journal.add(
                    "sequences",
                    id=f"{row['id']}:{number}",
                    session=sampler["session"],
                    logprobs=recorded,
                    created=time.time(),
                )
        wanted = request.target_prompt_logprobs
        targets = None if wanted is None else read_targets(wanted, len(prompt))
        # Only what the learner's thread computes waits for it.
        top_k, draws = request.topk_prompt_logprobs, request.prompt_alt_tokens_k
        if not (request.prompt_logprobs or top_k or draws or targets is not None):
            return write_samples(completions, Scores(), request.topk_sample_logprobs)
        scores = await self._run_in_thread(
            self.learner.score_prompt,
            folder,
            prompt,
            logprobs=bool(request.prompt_logprobs),
            last=request.prompt_logprobs_last_n,
            top_k=top_k,
            targets=targets,
            draws=draws,
            temperature=request.sampling_params.temperature,
            seed=seed,
        )

        return write_samples(completions, scores, request.topk_sample_logprobs)


def is_open(row: Any) -> bool:
    """Return whether a request has neither a result nor an error."""
    return row["result"] is None and row["error"] is None


def dump(response: Any) -> bytes:
    """Return a response of the protocol as JSON."""
    return response.model_dump_json(exclude_none=True).encode()
