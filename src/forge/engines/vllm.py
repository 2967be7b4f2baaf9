"""vLLM's asynchronous engine behind the interface of the embedded one, in a thread and processes of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..types import Completion, Sampling
from .interface import EngineFailed, Listener, check_length, check_prompt, check_request
from .settings import EngineSettings
from .vllm_args import OWNER, Request, check_keys, engine_args, import_args, sampling_params, top_logprobs
from .weights import Handover, load_eos, read_config

# How vLLM pauses for an update: the mode for running sequences, and whether keys and values are dropped.
PAUSE = {"continue": ("keep", False), "finish": ("wait", True), "recompute": ("keep", True)}
END = 60  # seconds for closing
LOOK = 1  # seconds between checks that vLLM's process is alive
DEAD = "vLLM's engine process has died"
STARTING = threading.Lock()  # of OWNER, which all engines of this process share

Order = tuple[Handover | Literal["release", "restore"], "Future[None]"]


class VLLMEngine:
    """An `Engine` for Llama, Qwen2 or Qwen3 checkpoints in vLLM.

    Every sample is a request of its own to vLLM, which computes their common prompt once as far as it fills blocks of
    its cache. Seeded samples are reproducible except for ties that rounding decides: products round differently with
    the batch. vLLM raises a temperature above 0 to at least 0.01.
    """

    def __init__(self, model: str | Path, *, version: int = 0, **settings: Any):
        """Start vLLM with a Hugging Face folder; takes 15 to 30 s.

        Args:
            settings: fields of `EngineSettings`. With on_update "continue", a sequence that vLLM preempts for lack of
                cache is recomputed under the new weights.

        Raises:
            ImportError: vLLM is not installed.
            FileNotFoundError, ValueError: an incomplete folder, or an invalid argument; before any process starts.
            RuntimeError: vLLM did not start.
        """
        folder = Path(model)
        import_args()
        self.config = config = read_config(folder)
        check_keys(config)
        how = EngineSettings(**{"engine": "vllm", **settings})
        self.max_seq_len = check_length(config, how.max_seq_len)
        self.on_update, self.eos = how.on_update, load_eos(folder, config)
        self.dtype: torch.dtype = getattr(torch, how.dtype)
        args, self._cpu = engine_args(folder, config, how.slots, self.max_seq_len, how.dtype, how.vllm)
        # vLLM's labels of the weights of each update, which its completions carry by token.
        self._label = "default"
        self._weights = (version, "")
        self._labels = {self._label: self._weights}  # in order: the current one, and those of running sequences
        self._updates = 0
        self._salt = ""  # prompts share blocks of the cache only under the same one
        self._memory: Literal["held", "released", "restored"] = "held"
        self._open = asyncio.Event()  # whether vLLM accepts requests; cleared by a release
        self._open.set()
        self._orders: deque[Order] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._unstarted: dict[str, None] = {}  # of vLLM's requests, in order
        self._given: dict[str, str] = {}  # those in vLLM, with the label of the weights when they were submitted
        self._idle = asyncio.Event()  # set while it has none
        self._started = self._generated = self._numbered = 0
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._pending: set[Future[Any]] = set()
        self._error: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main(args, ready)), name="forge-vllm", daemon=True
        )
        self._thread.start()
        ready.result()  # vLLM's own timeout is VLLM_ENGINE_READY_TIMEOUT_S

    def submit(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, priority: int = 0, listener: Listener | None = None
    ) -> Future[list[Completion]]:
        """As `Engine.submit`; the samples of a request may start at different times."""
        prompt = check_prompt(prompt_ids, self.config.vocab_size, self.max_seq_len)
        check_request(sampling, priority, self.config.vocab_size)
        limit = min(sampling.max_tokens, self.max_seq_len - len(prompt))
        stops = sorted({*self.eos, *sampling.stop_token_ids})
        request = Request(prompt, sampling, limit, stops, priority, listener)
        self._hand_in(request.future, self._begin, request)
        return request.future

    def update_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int, identity: str = ""
    ) -> Future[None]:
        """As `Engine.update_weights`, through shared memory, from which vLLM's processes read while paused."""
        future: Future[None] = Future()
        try:
            with self._lock:
                self._check_alive()
            handover = Handover(self.config, named_tensors, self.dtype, version, identity)
            try:
                self._hand_in(future, self._take, handover, future)
            except BaseException:
                handover.close()
                raise
        except Exception as error:
            future.set_exception(error)
        return future

    def release(self) -> Future[None]:
        """As `Engine.release`: vLLM's sleep mode, level 2. On a CPU only the cache is freed, not the weights."""
        future: Future[None] = Future()
        self._hand_in(future, self._take, "release", future)
        return future

    def restore(self) -> Future[None]:
        """As `Engine.restore`. On a GPU the next update allocates weights and cache."""
        future: Future[None] = Future()
        self._hand_in(future, self._take, "restore", future)
        return future

    @property
    def version(self) -> int:
        """Version of the weights that sample the next token."""
        return self._weights[0]

    @property
    def identity(self) -> str:
        """Identity of those weights."""
        return self._weights[1]

    def stats(self) -> dict[str, int]:
        """Running and waiting sequences, and the tokens delivered since the start (of running sequences only the first,
        unless they have a listener). RuntimeError: the engine is closed, or has failed."""
        with self._lock:
            self._check_alive()
        return {"running": self._started, "waiting": len(self._unstarted), "generated_tokens": self._generated}

    def close(self) -> None:
        """Stop vLLM and its processes. Incomplete requests fail with a RuntimeError."""
        with self._lock:
            if self._error is None:
                self._loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is not self._thread:
            self._thread.join(END)

    def __enter__(self) -> VLLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_alive(self) -> None:
        """RuntimeError: the engine has ended. The caller holds the lock, so that it cannot end meanwhile."""
        if self._error is not None:
            raise self._error
        if self._stop.is_set():
            raise RuntimeError("the engine is closed")
        if self._llm.errored:
            error = EngineFailed(DEAD)
            self._loop.call_soon_threadsafe(self._end, error)
            raise error

    def _hand_in(self, future: Future[Any], function: Callable[..., None], *args: Any) -> None:
        """Call a function, which settles the future, in the loop."""
        with self._lock:
            self._check_alive()
            self._pending.add(future)
            self._loop.call_soon_threadsafe(function, *args)
        future.add_done_callback(self._pending.discard)

    # Everything below runs in the loop.

    async def _main(self, args: Any, ready: Future[None]) -> None:
        try:
            from vllm.v1.engine.async_llm import AsyncLLM

            self._loop = asyncio.get_running_loop()
            with STARTING:
                os.environ[OWNER] = str(os.getpid())
                try:
                    self._llm = AsyncLLM.from_engine_args(args)
                finally:
                    del os.environ[OWNER]
        except ValueError as error:
            ready.set_exception(error)
            return
        except BaseException as error:
            ready.set_exception(
                RuntimeError(f"vLLM did not start with {args.model}: {error} (its own output says why)")
            )
            return
        ready.set_result(None)
        try:
            while not self._stop.is_set():
                if self._llm.errored:
                    self._end(EngineFailed(DEAD))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), LOOK)
        finally:
            self._end(RuntimeError("the engine was closed before this was complete"))
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._llm.shutdown(timeout=END / 4)
            del self._llm  # it would log an error at interpreter exit

    def _end(self, error: BaseException) -> None:
        """Fail all pending and later calls, with the first error."""
        with self._lock:
            self._error = self._error or error
            pending = [*self._pending]
        for future in pending:
            _settle(future, error=self._error)
        for what, _ in self._orders:
            if isinstance(what, Handover):
                what.close()
        self._orders.clear()
        self._stop.set()

    def _run(self, work: Any) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _begin(self, request: Request) -> None:
        if self._error is not None:  # it has ended meanwhile, and failed the request
            return
        task = self._run(self._answer(request))

        def cancel(future: Future[Any]) -> None:
            with self._lock:
                if future.cancelled() and self._error is None:
                    self._loop.call_soon_threadsafe(task.cancel)

        request.future.add_done_callback(cancel)

    async def _answer(self, request: Request) -> None:
        samples = [self._loop.create_task(self._sample(request, i)) for i in range(request.sampling.n)]
        try:
            _settle(request.future, await asyncio.gather(*samples))
        except Exception as error:
            if self._llm.errored:
                self._end(EngineFailed(DEAD))
            _settle(request.future, error=error)
        finally:
            for sample in samples:
                sample.cancel()

    async def _sample(self, request: Request, sample: int) -> Completion:
        params = sampling_params(request, sample, self.config.vocab_size)
        while (completion := await self._attempt(request, sample, params)) is None:
            pass
        return completion

    async def _attempt(self, request: Request, sample: int, params: Any) -> Completion | None:
        """The completion; None if it had not started when an update invalidated its prompt's cache."""
        from vllm.inputs import tokens_input

        name = str(self._numbered)
        self._numbered += 1
        self._unstarted[name] = None
        completion, sent = Completion(prompt_ids=request.prompt), 0
        try:
            while not self._open.is_set():  # it may be closed again before this runs
                await self._open.wait()
            self._given[name] = self._label
            salt = self._salt
            prompt = tokens_input(list(request.prompt), cache_salt=salt or None)
            async with contextlib.aclosing(
                self._llm.generate(prompt, params, name, priority=request.priority)
            ) as outputs:
                async for output in outputs:
                    part = output.outputs[0]
                    if name in self._unstarted:
                        if part.finish_reason == "abort" or salt != self._salt:
                            return None
                        del self._unstarted[name]
                        self._started += 1
                    ids = part.token_ids
                    completion.token_ids += ids
                    completion.logprobs += [of[token].logprob for token, of in zip(ids, part.logprobs, strict=True)]
                    completion.top_logprobs += top_logprobs(part.logprobs, request.sampling.top_logprobs)
                    self._generated += len(ids)
                    if request.listener and part.finish_reason is None:
                        sent += self._tell(request, sample, completion, sent, self._spans(name))
        finally:
            if name in self._unstarted:
                del self._unstarted[name]
            else:
                self._started -= 1
            self._given.pop(name, None)
            if not self._given:
                self._idle.set()
        if part.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a sequence after {len(completion.token_ids)} tokens: {part.finish_reason}")
        completion.finish = part.finish_reason
        spans = [(span.version, span.start) for span in part.weight_versions]
        self._tell(request, sample, completion, sent, spans)
        completion.versions, completion.identities = self._drew(spans, 0, len(completion.token_ids))
        return completion

    def _spans(self, name: str) -> list[tuple[str, int]]:
        """(label, first token) of the weights that drew a running sequence, which vLLM returns only at its end; empty
        if it has just ended."""
        states = self._llm.output_processor
        running = states.external_req_ids.get(name, ())
        return [span for key in running for span in states.request_states[key].weight_version_starts]

    def _drew(self, spans: Sequence[tuple[str, int]], start: int, end: int) -> tuple[list[int], dict[int, str]]:
        """The versions of the tokens from `start` to `end`, and their identities."""
        versions: list[int] = []
        identities = {}
        later = [first for _, first in spans[1:]] + [end]
        for (label, first), until in zip(spans, later, strict=True):
            count = min(until, end) - max(first, start)
            if count > 0:
                version, identity = self._labels[label]
                versions += [version] * count
                identities[version] = identity
        return versions, identities

    def _tell(
        self, request: Request, sample: int, completion: Completion, sent: int, spans: Sequence[tuple[str, int]]
    ) -> int:
        """Pass new tokens to the listener; returns how many. None while their weights are unknown."""
        if request.listener is None or request.future.done() or not spans:
            return 0
        versions, identities = self._drew(spans, sent, len(completion.token_ids))
        ids, logprobs = completion.token_ids[sent:], completion.logprobs[sent:]
        piece = Completion("", ids, logprobs, {}, request.prompt, versions, completion.finish, identities)
        piece.top_logprobs = completion.top_logprobs[sent:]
        request.listener(sample, piece)
        return len(ids)

    def _take(self, what: Any, future: Future[None]) -> None:
        if self._error is not None:  # it has ended meanwhile, and failed the future
            if isinstance(what, Handover):
                what.close()
            return
        if what == "release":
            self._open.clear()
        self._orders.append((what, future))
        if self._worker is None or self._worker.done():
            self._worker = self._run(self._carry_out())

    async def _carry_out(self) -> None:
        """Carry out the orders; of consecutive updates the newest, for all of them."""
        while self._orders:
            what, count = self._orders[0][0], 1
            try:
                if what == "release":
                    await self._release()
                elif what == "restore":
                    await self._restore()
                else:
                    count = await self._swap()
            except Exception as error:
                # The weights may be half of one version and half of another.
                self._end(EngineFailed(DEAD if self._llm.errored else f"vLLM failed: {error}"))
                return
            if self._error is not None:  # it has ended meanwhile, with the orders
                return
            for what, future in [self._orders.popleft() for _ in range(count)]:
                if isinstance(what, Handover):
                    what.close()
                _settle(future)
            if self._memory == "held" and all(what != "release" for what, _ in self._orders):
                self._open.set()

    async def _swap(self) -> int:
        llm = self._llm
        if self._memory == "held":
            mode, clear = PAUSE[self.on_update]
            if self.on_update == "finish":
                await self._drain()
            await llm.pause_generation(mode=mode, clear_cache=clear)
        await self._restore()
        updates = [what for what, _ in takewhile(lambda order: isinstance(order[0], Handover), self._orders)]
        newest: Any = updates[-1]
        await llm.collective_rpc("forge_load", args=(newest.path, newest.places, newest.dtype))
        self._updates += 1
        label = str(self._updates)
        await llm.update_weight_version(label)
        self._weights = self._labels[label] = (newest.version, newest.identity)
        self._label = label
        needed = {label, *self._given.values()}
        for old in takewhile(lambda old: old not in needed, [*self._labels]):
            del self._labels[old]
        if self.on_update == "continue":
            self._salt = label
            await llm.abort([*self._unstarted])
        if self._memory == "restored" and not self._cpu:
            await llm.wake_up(["kv_cache"])  # which resumes, too
        else:
            await llm.resume_generation()
        self._memory = "held"
        return len(updates)

    async def _drain(self) -> None:
        """Wait until vLLM has no requests. It gets none until `_open` is set, for which unstarted ones wait.

        vLLM's own waiting pause ignores preempted sequences, which would continue afterwards.
        """
        self._open.clear()
        await self._llm.abort([*self._unstarted])
        while self._given:
            self._idle.clear()
            await self._idle.wait()

    async def _release(self) -> None:
        if self._memory == "released":
            return
        await self._drain()
        if self._cpu:
            await self._llm.pause_generation(mode="wait", clear_cache=True)
            await self._llm.collective_rpc("forge_release")
        else:
            await self._llm.sleep(level=2, mode="wait")
        self._memory = "released"

    async def _restore(self) -> None:
        if self._memory != "released":
            return
        if self._cpu:
            await self._llm.collective_rpc("forge_restore")
        else:
            await self._llm.wake_up(["weights"])
        self._memory = "restored"


def _settle(future: Future[Any], value: Any = None, error: BaseException | None = None) -> None:
    if not future.done() and future.set_running_or_notify_cancel():
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
