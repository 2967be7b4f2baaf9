"""vLLM's asynchronous engine behind the interface of the embedded one, in a separate thread and processes."""

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge.engines.interface import EngineFailed, Listener, check_length, check_prompt, check_request
from forge.engines.settings import EngineSettings
from forge.engines.weights import load_eos, read_config
from forge.models.tokenizer import has_tokenizer
from forge.runtime.controller.types import keep_until_done
from forge.types import Completion, Sampling

from .arguments import (
    VLLMRequest,
    check_keys,
    engine_args,
    import_args,
    inherited_environment,
    sampling_params,
    settle_future,
    top_logprobs,
)
from .handover import Handover
from .updates import Command, Orders

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs, SamplingParams

CLOSE_TIMEOUT = 60  # seconds: a hanging process must not keep the caller
# Seconds in which vLLM's processes may end by themselves, before they are killed: by then they hold nothing of value.
# The exit of one takes 2 to 3 s of CPU time, and a replica's teardown as a whole may take 5 s.
CLOSE_GRACE = 3.0
CHECK_INTERVAL = 1  # seconds between checks that vLLM's process is alive
DEAD = "vLLM's engine process has died"
STARTING = threading.Lock()  # guards the environment, which all engines of this process share


class VLLMEngine:
    """An `Engine` for Llama, Qwen2 or Qwen3 checkpoints in vLLM.

    Every sample is a separate request to vLLM, which computes their common prompt once as far as it fills blocks of
    its cache. Seeded samples are reproducible except for ties that rounding decides: products round differently with
    the batch. vLLM raises a temperature above 0 to at least 0.01.
    """

    def __init__(self, model: str | Path, *, version: int = 0, **settings: Any):
        """Start vLLM with a Hugging Face folder; takes 15 to 30 s.

        Args:
            version: the number of the weights in the folder.
            settings: fields of `EngineSettings`. With on_update "continue", a sequence that vLLM preempts for lack of
                cache is recomputed under the new weights.

        Raises:
            ImportError: vLLM is not installed.
            FileNotFoundError: the folder is incomplete; no process has started.
            ValueError: an argument is invalid; no process has started.
            RuntimeError: vLLM did not start.
        """
        folder = Path(model)
        import_args()
        self.config = config = read_config(folder)
        check_keys(config)
        options = EngineSettings(**{"engine": "vllm", **settings})
        self.max_seq_len = check_length(config, options.max_seq_len)
        self.eos = load_eos(folder, config)
        self._reads_texts = has_tokenizer(folder)

        self.dtype: torch.dtype = getattr(torch, options.dtype)
        args, on_cpu = engine_args(folder, config, options.slots, self.max_seq_len, options.dtype, options.vllm)
        self.on_update = options.on_update
        self._orders = Orders(on_cpu, version)
        self._worker: asyncio.Task[None] | None = None
        self._started = self._generated = self._numbered = self._prefilled = self._reused = 0
        self._lock = threading.Lock()

        # Guarded by the lock.
        self._pending: set[Future[Any]] = set()
        self._error: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run_vllm(args, ready)), name="forge-vllm", daemon=True
        )

        self._thread.start()
        ready.result()  # vLLM's own timeout is VLLM_ENGINE_READY_TIMEOUT_S

    def submit(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, priority: int = 0, listener: Listener | None = None
    ) -> Future[list[Completion]]:
        """Start the completions of a prompt, as `Engine.submit`; its samples may start at different times."""
        prompt = check_prompt(prompt_ids, self.config.vocab_size, self.max_seq_len)
        check_request(sampling, priority, self.config.vocab_size)
        if sampling.schedule:
            raise ValueError("vLLM does not support Sampling.schedule: omit it, or use the embedded engine")
        if sampling.grammar.lstrip().startswith("{"):
            raise ValueError("vLLM needs a grammar in Lark, not llguidance's JSON: see forge_agents.grammar")
        if sampling.stop and not self._reads_texts:
            raise ValueError(
                "stop texts need the model's tokenizer, but its directory has none: use stop_token_ids, or add the "
                "tokenizer files"
            )
        limit = min(sampling.max_tokens, self.max_seq_len - len(prompt))
        stops = sorted({*self.eos, *sampling.stop_token_ids})
        # The loop's thread serves the request from here on.
        request = VLLMRequest(prompt, sampling, limit, stops, priority, listener)
        self._call_in_loop(request.future, self._begin_request, request)
        return request.future

    def update_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int, identity: str = ""
    ) -> Future[None]:
        """Replace all weights, as `Engine.update_weights`. vLLM's processes read them from shared memory in a pause."""
        try:
            with self._lock:
                self._check_alive()
            # Copied in the caller's thread; vLLM continues until its processes read the copy.
            return self._add_order(Handover(self.config, named_tensors, self.dtype, version, identity))
        except Exception as error:
            future: Future[None] = Future()
            future.set_exception(error)
            return future

    def release(self) -> Future[None]:
        """Free memory, as `Engine.release`, by vLLM's sleep mode, level 2. On a CPU only the cache is freed."""
        return self._add_order("release")

    def restore(self) -> Future[None]:
        """Allocate memory again, as `Engine.restore`. On a GPU the next update allocates weights and cache."""
        return self._add_order("restore")

    @property
    def version(self) -> int:
        """Return the version of the weights that sample the next token."""
        return self._orders.weights[self._orders.current][0]

    @property
    def identity(self) -> str:
        """Return the identity (digest) of the weights that sample the next token."""
        return self._orders.weights[self._orders.current][1]

    def stats(self) -> dict[str, int]:
        """Return the counters of `Engine.stats`, and `prefilled_tokens` and `reused_tokens` of prompts for each sample.

        Of running sequences without a listener, only the first token counts as generated.
        """
        with self._lock:
            self._check_alive()
        return {
            "running": self._started,
            "waiting": len(self._orders.unstarted),
            "generated_tokens": self._generated,
            "prefilled_tokens": self._prefilled,
            "reused_tokens": self._reused,
        }

    def held(self) -> list[int]:
        """Return an empty list: no request waits for other weights, as vLLM supports no schedules."""
        return []

    def close(self) -> None:
        """Stop vLLM and its processes. Incomplete requests fail with a RuntimeError."""
        with self._lock:
            if self._error is None:
                self._loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT)

    def __enter__(self) -> "VLLMEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_alive(self) -> None:
        """Raise the engine's error if it has ended. The caller holds the lock, so that it cannot end meanwhile."""
        if self._error is not None:
            raise self._error
        if self._stop.is_set():
            raise RuntimeError("the engine is closed")
        if self._llm.errored:
            error = EngineFailed(DEAD)
            self._loop.call_soon_threadsafe(self._fail_all, error)
            raise error

    def _call_in_loop(self, future: Future[Any], function: Callable[..., None], *args: object) -> None:
        """Call a function, which settles the future, in the loop's thread."""
        with self._lock:
            self._check_alive()
            self._pending.add(future)
            self._loop.call_soon_threadsafe(function, *args)
        future.add_done_callback(self._pending.discard)

    def _add_order(self, command: Command) -> Future[None]:
        future: Future[None] = Future()
        self._call_in_loop(future, self._submit_order, command, future)
        return future

    # The methods below run in the thread of the loop.

    async def _run_vllm(self, args: "AsyncEngineArgs", ready: Future[None]) -> None:
        """Start vLLM, watch its process, and shut it down when the engine closes."""
        try:
            from vllm.v1.engine.async_llm import AsyncLLM

            self._loop = asyncio.get_running_loop()
            with STARTING, inherited_environment():
                self._llm = self._orders.llm = AsyncLLM.from_engine_args(args)
        except ValueError as error:
            ready.set_exception(error)
            return
        except BaseException as error:
            ready.set_exception(RuntimeError(f"vLLM did not start with {args.model}: {error} (see its output above)"))
            return

        ready.set_result(None)
        try:
            while not self._stop.is_set():
                if self._llm.errored:
                    self._fail_all(EngineFailed(DEAD))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), CHECK_INTERVAL)
        finally:
            self._fail_all(RuntimeError("the engine was closed before this was complete"))
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._llm.shutdown(timeout=CLOSE_GRACE)
            del self._llm, self._orders.llm  # vLLM would log an error if it were deleted at the exit of Python

    def _fail_all(self, error: BaseException) -> None:
        """Fail all pending and later calls with this error, or with an earlier one if there was one."""
        with self._lock:
            self._error = self._error or error
            pending = [*self._pending]
        for future in pending:
            settle_future(future, error=self._error)
        self._orders.drop()
        self._stop.set()

    def _create_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task of the loop, which is cancelled when the engine closes; return it."""
        return keep_until_done(self._tasks, self._loop.create_task(coroutine))

    def _begin_request(self, request: VLLMRequest) -> None:
        if self._error is not None:  # the engine has ended meanwhile, and failed the request
            return
        task = self._create_task(self._serve_request(request))

        def cancel_request(future: Future[Any]) -> None:
            with self._lock:
                if future.cancelled() and self._error is None:
                    self._loop.call_soon_threadsafe(task.cancel)

        request.future.add_done_callback(cancel_request)

    async def _serve_request(self, request: VLLMRequest) -> None:
        """Generate the samples of a request, and complete the request's future."""
        # The result has all samples: the error of one cancels the others.
        samples = [self._loop.create_task(self._sample_request(request, i)) for i in range(request.sampling.n)]
        try:
            settle_future(request.future, await asyncio.gather(*samples))
        except Exception as error:
            if self._llm.errored:
                self._fail_all(EngineFailed(DEAD))
            settle_future(request.future, error=error)
        finally:
            for sample in samples:
                sample.cancel()

    async def _sample_request(self, request: VLLMRequest, sample: int) -> Completion:
        params = sampling_params(request, sample, self.config.vocab_size)
        while (completion := await self._attempt_sample(request, sample, params)) is None:
            pass
        return completion

    async def _attempt_sample(self, request: VLLMRequest, sample: int, params: "SamplingParams") -> Completion | None:
        """Return a sample's completion; None if an update came before its first token, so that it must start again."""
        from vllm.inputs import tokens_input

        name = str(self._numbered)
        self._numbered += 1
        orders = self._orders
        orders.unstarted[name] = None
        completion = Completion(prompt_ids=request.prompt)
        sent = 0  # tokens that the listener has got
        has_unknown_logprobs = request.sampling.logprobs_of == "policy" and request.sampling.restricted

        try:
            while not orders.open.is_set():  # it may be cleared again before this runs
                await orders.open.wait()
            orders.in_flight.add(name)
            salt = orders.salt
            prompt = tokens_input(list(request.prompt), cache_salt=salt or None)

            async with contextlib.aclosing(
                self._llm.generate(prompt, params, name, priority=request.priority)
            ) as outputs:
                async for output in outputs:
                    part = output.outputs[0]
                    # Before its first token, an update makes it start again: the keys and values of its prompt were
                    # computed with the old weights.
                    if name in orders.unstarted:
                        if part.finish_reason == "abort" or salt != orders.salt:
                            return None
                        del orders.unstarted[name]
                        self._started += 1
                        reused = output.num_cached_tokens or 0
                        self._reused += reused
                        self._prefilled += len(request.prompt) - reused

                    ids = part.token_ids
                    completion.token_ids += ids
                    drawn = [entries[token].logprob for token, entries in zip(ids, part.logprobs, strict=True)]

                    # vLLM reports the distribution after restrictions: the policy's log-probabilities are unknown.
                    completion.logprobs += [math.nan] * len(ids) if has_unknown_logprobs else drawn
                    completion.top_logprobs += top_logprobs(part.logprobs, request.sampling.top_logprobs)
                    self._generated += len(ids)
                    if request.listener and part.finish_reason is None:
                        sent += self._notify_listener(request, sample, completion, sent, self._weight_spans(name))
        finally:
            if name in orders.unstarted:
                del orders.unstarted[name]
            else:
                self._started -= 1
            orders.in_flight.discard(name)
            if not orders.in_flight:
                orders.idle.set()

        if part.finish_reason == "error" and request.sampling.grammar and not completion.token_ids:
            raise ValueError("vLLM cannot use this grammar, or this tokenizer with a grammar: see its output above")

        # An abort that was not due to an update, or an error of vLLM.
        if part.finish_reason not in ("stop", "length"):
            raise RuntimeError(
                f"vLLM stopped a sequence after {len(completion.token_ids)} tokens for the unexpected reason "
                f"{part.finish_reason}"
            )
        completion.finish = part.finish_reason
        spans = [(span.version, span.start) for span in part.weight_versions]
        self._notify_listener(request, sample, completion, sent, spans)
        completion.versions, completion.identities = self._orders.of_tokens(spans, 0, len(completion.token_ids))

        return completion

    def _weight_spans(self, name: str) -> list[tuple[str, int]]:
        """Return the (label, first token) of all weights that sampled a running sequence; [] if it has just ended.

        vLLM returns them only at the end of a sequence: this reads its internal state.
        """
        states = self._llm.output_processor
        running = states.external_req_ids.get(name, ())
        return [span for key in running for span in states.request_states[key].weight_version_starts]

    def _notify_listener(
        self, request: VLLMRequest, sample: int, completion: Completion, sent: int, spans: Sequence[tuple[str, int]]
    ) -> int:
        """Pass new tokens to the listener, if there is one; return their number, 0 while their weights are unknown.

        Args:
            sent: the number of tokens that the listener has got already.
            spans: the (label, first token) of the weights that drew the completion.
        """
        if request.listener is None or request.future.done() or not spans:
            return 0
        versions, identities = self._orders.of_tokens(spans, sent, len(completion.token_ids))
        ids = completion.token_ids[sent:]
        logprobs = completion.logprobs[sent:]
        piece = Completion("", ids, logprobs, {}, request.prompt, versions, completion.finish, identities)
        piece.top_logprobs = completion.top_logprobs[sent:]
        request.listener(sample, piece)
        return len(ids)

    def _submit_order(self, command: Command, future: Future[None]) -> None:
        if self._error is not None:  # the engine has ended meanwhile, and failed the future
            if isinstance(command, Handover):
                command.close()
            return
        self._orders.add(command, future)
        if self._worker is None or self._worker.done():
            self._worker = self._create_task(self._execute_orders())

    async def _execute_orders(self) -> None:
        try:
            await self._orders.execute(self.on_update)
        except Exception as error:
            self._fail_all(EngineFailed(DEAD if self._llm.errored else f"vLLM failed: {error}"))
