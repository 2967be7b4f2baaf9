"""The embedded generation engine: a running batch, and the thread that steps it."""

import bisect
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..config.plugin import resolve
from ..system.devices import find_accelerator, has_bfloat16
from ..types import Completion, Sampling
from .batch import RunningBatch
from .cache import BLOCK, WIDTH, round_up, state_bytes, token_bytes
from .decoder import Decoder
from .graphs import GRANULE, graphs_on
from .interface import EngineFailed, Listener, check_length, check_prompt, check_request
from .requests import EngineRequest, fail_passed_over
from .restrictions import Words
from .settings import EngineSettings
from .weights import Weights, is_decodable, load_config, load_eos, read_checkpoint

log = logging.getLogger(__name__)
# Bytes that a GPU keeps for a prefill, libraries and gaps between allocations: a generous estimate, not a measurement.
MARGIN = 3 << 29
Command = Weights | Literal["release", "restore"]
Order = tuple[Command, "Future[None]"]


class EmbeddedEngine:
    """An `Engine` for checkpoints of causal language models in this process.

    All callers share one batch of rows, which runs in a separate thread. A request starts as soon as rows are free; its
    prompt is computed once for all samples.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str | torch.device | None = None,
        version: int = 0,
        prefill_tokens: int | None = None,
        colocated: bool = False,
        **settings: Any,
    ):
        """Load a Hugging Face folder (config.json and safetensors).

        Args:
            device: by default a GPU if there is one.
            version: the number of the weights in the folder, whose identity is "".
            prefill_tokens: prompt tokens computed between two decode steps; a longer prompt is computed in pieces. By
                default 4096, and 1024 on a CPU: larger products are no faster there, and the first prompts would wait
                for the last.
            colocated: it is released before each weight update, so that no memory is kept for the next weights.
            settings: fields of `forge.engines.settings.EngineSettings`. With `on_update` "finish" nothing is admitted
                before an update; with "recompute" running sequences are preempted and resume before waiting requests.
                Drawn tokens keep their log-probabilities and versions.

        Raises:
            FileNotFoundError: the folder is incomplete.
            ValueError: the model is unsupported, or an argument invalid.
        """
        folder = Path(model)
        self.config = config = load_config(folder)
        self._vocabulary = config.get_text_config().vocab_size
        options = EngineSettings(**settings)
        if prefill_tokens is not None and prefill_tokens < 1:
            raise ValueError(f"prefill_tokens must be at least 1, got {prefill_tokens}")

        self.max_seq_len = check_length(config, options.max_seq_len)
        self.device = torch.device(device or find_accelerator() or "cpu")
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        if self.dtype == torch.bfloat16 and not has_bfloat16(self.device):
            log.info("generator.dtype: this CPU has no bfloat16 arithmetic; computing in float32")
            self.dtype = torch.float32
        self.eos = load_eos(folder, config)
        self._folder = folder
        self._words = Words(folder)
        self.on_update = options.on_update
        options.check(config)
        graphs = graphs_on(self.device) if options.captures(config, self.device.type) else None

        # Of most model types transformers' modules, with this engine's cache.
        self._make_weights: Callable[..., Weights]
        self._make_weights, make_decoder, named_tensors = (
            (Weights, partial(Decoder, exact=options.exact), read_checkpoint(folder))
            if is_decodable(config)
            else resolve("forge_families.engine:open_model", "model")(folder, self.dtype, self.device)
        )
        weights = self._make_weights(config, named_tensors, self.dtype, self.device, version)
        decoder = make_decoder(
            config,
            weights,
            round_up(options.slots, WIDTH),
            self.max_seq_len,
            self.dtype,
            self.device,
            options.router_replay,
            self._cache_limit(options, colocated),  # measured after the weights have taken their part of the memory
            granule=16 if graphs is None else GRANULE,
        )
        self._batch = RunningBatch(
            decoder,
            options.slots,
            prefill_tokens or (1024 if self.device.type == "cpu" else 4096),
            int(options.prefix_cache_mb * 1e6) if decoder.has_prefixes else 0,
            self._words,
            graphs,
        )
        self._waiting: deque[EngineRequest] = deque()

        self._orders: deque[Order] = deque()  # accepted by the engine's thread, not yet executed
        self._released = False
        self._wake = threading.Condition()

        # Guarded by _wake: the callers' side.
        self._submitted: list[EngineRequest] = []
        self._cancelled: list[EngineRequest] = []
        self._new_orders: list[Order] = []
        self._closing = self._is_idle = False
        self._error: BaseException | None = None
        threads = torch.get_num_threads()  # a new thread would start from OMP_NUM_THREADS instead

        self._thread = threading.Thread(target=self._step_batch, args=(threads,), name="forge-engine", daemon=True)
        self._thread.start()

    def submit(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, priority: int = 0, listener: Listener | None = None
    ) -> Future[list[Completion]]:
        """Start the completions of a prompt, as `Engine.submit`.

        On a CPU in float32 the result of a seeded request depends on the request and the weights only, bit for bit, on
        one machine and number of threads (tested with one and two). Elsewhere the random numbers are the same, but
        matrix products may round differently with the batch.
        """
        prompt = check_prompt(prompt_ids, self._vocabulary, self.max_seq_len)
        check_request(sampling, priority, self._vocabulary)
        if sampling.images and not self._batch.decoder.takes_images:
            raise ValueError(
                "this model reads text only: pass a prompt without images, or use a model with an image processor"
            )

        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        limit = min(sampling.max_tokens, self.max_seq_len - len(prompt))
        stops = frozenset((*self.eos, *sampling.stop_token_ids))
        grammar = self._grammars.matcher(sampling.grammar, stops) if sampling.grammar else None
        if sampling.stop:
            self._words.open()
        request = EngineRequest(prompt, sampling, limit, seed, stops, priority, listener, grammar)

        def free_rows(future: Future[list[Completion]]) -> None:
            # Not only a cancelled future: a failed listener fails it while its samples still run.
            if future.cancelled() or future.exception():
                with self._wake:
                    self._cancelled.append(request)
                    self._wake.notify()

        request.future.add_done_callback(free_rows)
        with self._wake:
            self._check_alive()
            self._submitted.append(request)
            self._wake.notify()

        return request.future

    def update_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int, identity: str = ""
    ) -> Future[None]:
        """Replace all weights, as `Engine.update_weights`. They change between two decode steps; generation continues
        while the tensors are read."""
        try:
            with self._wake:
                self._check_alive()
            # Read without the lock, which takes seconds; the engine may have failed meanwhile.
            weights = self._make_weights(self.config, named_tensors, self.dtype, self.device, version, identity)
            return self._submit_order(weights)
        except Exception as error:
            failed: Future[None] = Future()
            failed.set_exception(error)
            return failed

    def release(self) -> Future[None]:
        """Free the memory of weights and cache, as `Engine.release`."""
        return self._submit_order("release")

    def restore(self) -> Future[None]:
        """Let a released engine accept weights, as `Engine.restore`; the next weight update allocates the memory."""
        return self._submit_order("restore")

    @property
    def version(self) -> int:
        """Return the version of the weights that sample the next token."""
        return self._batch.history.current.version

    @property
    def identity(self) -> str:
        """Return the identity (digest) of the weights that sample the next token."""
        return self._batch.history.current.identity

    def stats(self) -> dict[str, int]:
        """Return the counters of `Engine.stats`, and `prefilled_tokens`, `reused_tokens` (tokens of prompts that the
        prefix cache had), `decode_steps` and `cache_bytes`. Preempted samples count as `waiting`, tokens recomputed
        after a weight update as prefilled."""
        batch = self._batch
        with self._wake:
            self._check_alive()
            requests = [*self._waiting, *self._submitted]
        unfinished = sum(request.sampling.n - request.admitted for request in requests)
        return {
            "running": batch.running,
            "waiting": unfinished + len(batch.preempted) + len(batch.paused),
            "generated_tokens": batch.generated,
            "prefilled_tokens": batch.prefill.computed,
            "reused_tokens": batch.prefill.reused,
            "decode_steps": batch.steps,
            "cache_bytes": batch.decoder.cache.nbytes,
        }

    def held(self) -> list[int]:
        """Return the seeds of requests whose schedules wait for other weights, as `Engine.held`."""
        with self._wake:
            self._check_alive()
            if not self._is_idle or self._submitted or self._new_orders:
                return []
            requests = {row.request for row in self._batch.paused} | {*self._waiting}
            return [request.seed for request in requests if request.sampling.schedule]

    def close(self) -> None:
        """Stop the engine; incomplete requests fail. From the engine's thread it does not wait for the end."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> "EmbeddedEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cache_limit(self, settings: EngineSettings, colocated: bool) -> int | None:
        """Return the maximum bytes of keys and values; None on a CPU: as many as `slots` sequences need.

        Raises:
            ValueError: too few for three rows: the two that a decode step has at least, and the prefill row.
        """
        minimum = (
            3 * round_up(self.max_seq_len, BLOCK) * token_bytes(self.config, self.dtype, settings.router_replay)
            + (round_up(settings.slots, WIDTH) + 1) * state_bytes(self.config)  # all from the start
        )
        if settings.cache_gb is not None:
            limit = round(settings.cache_gb * 1e9)
            source = "generator.cache_gb"
        elif self.device.type != "cuda":
            return None
        else:
            torch.accelerator.empty_cache()
            free, _ = torch.cuda.mem_get_info(self.device)
            # The rest of the memory must hold the next weights, which are filled while these decode, and the logits.
            files = [] if colocated else [path.stat().st_size for path in self._folder.glob("*.safetensors")]
            weights = sum(files) * self.dtype.itemsize // getattr(self.config.dtype, "itemsize", 4)
            logits = 4 * settings.slots * self._vocabulary * 4  # float32, with three copies that sampling makes
            if settings.captures(self.config, self.device.type):
                logits *= 2  # logits of captured steps have separate memory
            limit = free - weights - logits - int(settings.prefix_cache_mb * 1e6) - MARGIN
            source = f"this device has {free / 1e9:.1f} GB left, and the engine"

        if limit < minimum:
            raise ValueError(
                f"{source}: {max(limit, 0) / 1e6:,.1f} MB for keys and values are less than the {minimum / 1e6:,.1f} "
                f"MB of three sequences of {self.max_seq_len} tokens and all slots' recurrent states: lower "
                "generator.max_seq_len or generator.slots"
            )

        return limit

    @cached_property
    def _grammars(self) -> Any:
        # Compiled by the extension, from the first request that has one.
        return resolve("forge_agents.grammar:Grammars", "grammar")(self._folder, self._vocabulary)

    def _submit_order(self, command: Command) -> Future[None]:
        future: Future[None] = Future()
        with self._wake:
            self._check_alive()
            self._new_orders.append((command, future))
            self._wake.notify()
        return future

    def _check_alive(self) -> None:
        if self._closing:
            raise RuntimeError("the engine is closed and accepts no requests")
        if self._error is not None:
            raise self._error

    def _step_batch(self, threads: int) -> None:
        """Step the batch until the engine closes or fails; runs in the engine's thread."""
        torch.set_num_threads(threads)
        error: BaseException = RuntimeError("the engine was closed before the request was complete")
        try:
            with torch.inference_mode():
                while self._accept_requests():
                    # A pending order waits for running sequences, so that no others start; except by a schedule, which
                    # may need the weights in use before the order replaces them.
                    is_held = self._released or (self._orders and not self._batch.is_scheduled(self._waiting))
                    self._batch.admit(deque() if is_held else self._waiting)
                    for request in self._batch.step() if self._batch.rows else ():
                        # The request's listener may have failed it in this step.
                        if not request.future.done() and request.future.set_running_or_notify_cancel():
                            request.future.set_result([request.completions[i] for i in sorted(request.completions)])
        except BaseException as raised:  # any error must reach the callers
            error = EngineFailed(f"the engine ended by {type(raised).__name__}: {raised}")
            error.__cause__ = raised

        # From here on new calls raise the error; the futures of earlier ones get it below.
        with self._wake:
            self._error = error
            rows = (*self._batch.rows, *self._batch.preempted, *self._batch.paused)
            requests = {row.request for row in rows} | {*self._waiting, *self._submitted}
            orders = [future for _, future in (*self._orders, *self._new_orders)]
            self._orders.clear()
            self._new_orders.clear()
            self._waiting.clear()
            self._submitted.clear()

        pending: list[Future[Any]] = [request.future for request in requests]
        for future in pending + orders:
            if not future.done() and future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _accept_requests(self) -> bool:
        """Accept the callers' requests and orders, waiting if nothing runs. Return False if the engine closes."""
        batch = self._batch
        with self._wake:
            while not (self._closing or self._submitted or self._new_orders or self._cancelled):
                can_start = any(request.startable(self.version) for request in self._waiting)
                if (can_start and not self._released) or self._orders or batch.running or batch.preempted:
                    break
                self._is_idle = True
                self._wake.wait()

            self._is_idle = False
            if self._closing:
                return False

            # Waiting requests stay in order: a new one comes after others of its priority.
            submitted, self._submitted = self._submitted, []
            for request in submitted:
                bisect.insort(self._waiting, request, key=lambda waiting: waiting.priority)
            cancelled, self._cancelled = self._cancelled, []
            self._orders.extend(self._new_orders)
            self._new_orders = []

        # Outside the lock: callers need not wait for the batch.
        fail_passed_over(submitted, self.version)
        for request in cancelled:
            batch.drop(request)
            if request in self._waiting:
                self._waiting.remove(request)

        while self._orders and self._execute_order():
            pass
        return True

    def _execute_order(self) -> bool:
        """Execute the first pending order, of consecutive weight updates the newest; return False while running
        sequences must finish first."""
        batch = self._batch
        command, _ = self._orders[0]
        count = 1  # orders that this completes

        if not isinstance(command, str):
            if (self.on_update == "finish" and batch.running) or batch.is_scheduled(self._waiting):
                return False
            updates = list(takewhile(lambda order: not isinstance(order[0], str), self._orders))
            count = len(updates)
            newest, _ = updates[-1]
            batch.switch(newest, self._waiting, preempt=self.on_update == "recompute")  # type: ignore[arg-type]
            self._released = False
        elif command == "release" and not self._released:
            # Preempted samples resume first: their tokens are of weights that are dropped here.
            if batch.running or batch.preempted:
                return False
            batch.release(self._waiting)
            self._released = True

        for _, future in [self._orders.popleft() for _ in range(count)]:
            if future.set_running_or_notify_cancel():
                future.set_result(None)
        return True
