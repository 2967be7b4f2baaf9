"""The policy as a service: prompts in, completions with log-probabilities and policy versions out."""

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..engines import EngineSettings, load_engine
from ..engines.interface import EngineFailed
from ..models.flops import count_causal, forward_flops
from ..models.hub import check_model_name
from ..models.tokenizer import open_tokenizer
from ..models.weight_layouts import has_adapters, merge_adapters
from ..observability import Reduce, phase, record_metric
from ..observability.metrics import record_span
from ..runtime.controller import ForgeActor, Options, Service, endpoint
from ..runtime.store import Store, VersionStore
from ..system.devices import find_accelerator
from ..types import Completion, Prompt, Sampling
from .identity import POLICY, check_current, describe_difference
from .publication import connect_store, controller_store, publish_before_updates
from .staleness import StaleWeights
from .streams import Streams

SPAN = 0.25  # seconds of a span in the trace, at least


class Generator(ForgeActor):
    """One generation engine. All concurrent callers share its batch.

    Args:
        model: Hugging Face folder or hub id to start from (version 0), and what adapters are merged into.
        store: where new versions come from; None for a policy that never changes.
        weights_key: under which; their trainer's.
        temperature, top_p, top_k, max_tokens, stop_token_ids: defaults of `generate`.
        sampling: additional ones, fields of `forge.types.Sampling`.
        settings: fields of `forge.engines.EngineSettings`: engine, slots, max_seq_len, dtype, on_update, vllm.
    """

    constructor_checks = True

    def __init__(
        self,
        model: str,
        *,
        store: Store | None = None,
        weights_key: str = POLICY,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        max_tokens: int = 128,
        stop_token_ids: Sequence[int] = (),
        sampling: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        check_model_name(model)
        self.model = model
        self.store_ref = store
        self.weights_key = weights_key
        self.settings = EngineSettings(**settings)
        self.store: Store | None = None

        # Updates under way, requested so far, and the latest of them that was loaded.
        self.updating = self.asked = self.loaded = 0

        # requests, and when the span of the trace started
        self.running = 0
        self.since = 0.0
        self.loading = threading.Lock()
        self.defaults: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        self.defaults |= {"max_tokens": max_tokens, "stop_token_ids": tuple(stop_token_ids), **(sampling or {})}
        Sampling(**self.defaults)  # a wrong one is an error here, and not of each request

    @classmethod
    def place(cls, options: Options, kwargs: dict[str, Any]) -> tuple[Options, dict[str, Any]]:
        """Return one model over `procs` devices is one process that sees them all: vLLM starts its workers itself."""
        engine_settings = {name: value for name, value in kwargs.items() if name in EngineSettings.model_fields}
        settings = EngineSettings(**engine_settings).over(options.procs)
        if options.procs == 1:
            return options, kwargs
        if options.hosts not in (None, 1) or options.share is not None:
            raise ValueError(
                f"a generator over {options.procs} processes is within one host, in no share: leave hosts and share out"
            )
        gpus = options.procs if options.with_gpus else 1
        placed = {**options, "procs": 1, "gpus_per_proc": gpus, "hosts": None}
        return Options(**placed), kwargs | {"vllm": settings.vllm}

    @classmethod
    def started(cls, service: Service, kwargs: Mapping[str, Any]) -> None:
        """Publish a version on demand before an update to it, see `forge.actors.publication`."""
        store = controller_store(kwargs.get("store"))
        if store is not None:
            publish_before_updates(store, service, kwargs.get("weights_key", POLICY))

    def setup(self) -> None:
        """Build the engine and load the newest published weights, or the model folder's."""
        import torch
        from transformers import AutoConfig

        self.store = connect_store(self.store_ref)
        self.architecture = AutoConfig.from_pretrained(self.model, trust_remote_code=False)
        self.tokenizer = open_tokenizer(self.model)
        self.special = frozenset(self.tokenizer.all_special_ids)
        device = None
        if self.settings.engine == "embedded" and (kind := find_accelerator()):
            # Where processes are shared with a trainer each of them sees the devices of all.
            index = self.context.replica % torch.accelerator.device_count()
            device = torch.device(kind.type, index)
        self.engine = load_engine(model=self.model, device=device, **self.settings)
        self.streams = Streams(self.engine)

    def teardown(self) -> None:
        """Close the engine."""
        if hasattr(self, "engine"):
            self.engine.close()

    @endpoint
    async def generate(
        self, prompt: Prompt | str | Sequence[int], n: int | None = None, priority: int = 0, **sampling: Any
    ) -> Completion | list[Completion]:
        """Sample completions of one prompt.

        Args:
            prompt: text is tokenised here; a Prompt or token ids are taken as they are.
            n: number of samples. None gives one Completion, a number a list of that many.
            priority: of prompts that wait, the one with the lowest starts first.
            sampling: fields of `Sampling` that differ from this generator's defaults.

        Raises:
            ValueError: a bad sampling setting, or a prompt that leaves no room for a token.
            StaleWeights: this generator missed an update.
        """
        settings = Sampling(n=1 if n is None else n, **self._merge_sampling(prompt, sampling))
        with self._exit_on_failure(), self._trace_busy():
            submitted = self.engine.submit(self._token_ids(prompt), settings, priority=priority)
            completions = await asyncio.wrap_future(submitted)
        self._check_current()
        texts = self.tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
        for completion, text in zip(completions, texts, strict=True):
            completion.text, completion.sampled_by = text, str(self.context)
        prompt_length = len(completions[0].prompt_ids)

        lengths = [len(c.token_ids) for c in completions]
        attended = count_causal(prompt_length) + sum(count_causal(length, prompt_length) for length in lengths)
        flops = forward_flops(self.architecture, prompt_length + sum(lengths), attended, sum(lengths))
        record_metric("generator/tokens", sum(lengths), Reduce.SUM)

        for completion in completions:
            # The token that ends an answer is meant to be one.
            ids = completion.token_ids[: -1 if completion.finish == "stop" else None]
            if ids:
                record_metric("generation/special_tokens", sum(token in self.special for token in ids) / len(ids))

        record_metric("generator/flops", flops, Reduce.SUM)
        return completions[0] if n is None else completions

    @endpoint
    async def open_stream(
        self, prompt: Prompt | str | Sequence[int], priority: int = 0, stream: int | None = None, **sampling: Any
    ) -> int:
        """Start a stream, which `next_pieces` of this replica reads: call both within one `session`.

        Args:
            prompt, priority, sampling: as of `generate`; `n` is among the sampling.
            stream: the stream's number, by default a new one. One that the caller has drawn can be closed even if this
                call's answer is lost.

        Raises:
            ValueError: as of `generate`.
        """
        settings = Sampling(**self._merge_sampling(prompt, sampling))
        with self._exit_on_failure():
            return self.streams.open(self._token_ids(prompt), settings, priority, stream)

    @endpoint
    async def next_pieces(self, stream: int) -> list[tuple[int, Completion]]:
        """Return new tokens since the last call: (sample, piece) pairs, at most one of each sample, without text.

        Empty if there were none for a second. `finish` is "" except in the last piece of a sample.

        Raises:
            StreamLost: the stream is of another replica, or of a lost one, or it was not read for a minute.
            StaleWeights: this generator missed an update.
        """
        with self._exit_on_failure():
            pieces = await self.streams.next(stream)
        self._check_current()
        for _, piece in pieces:
            piece.sampled_by = str(self.context)
        return pieces

    @endpoint
    async def close_stream(self, stream: int) -> None:
        """Close a stream, and cancel its request."""
        self.streams.close(stream)

    @endpoint(catch_up=True)
    async def update_weights(self, version: int) -> int:
        """Load a published version while decoding continues, swap it in between two steps; returns the version in use.
        A fanout of a version that has the number of the trainer's step, and was not published, publishes it first.

        With `on_update` "finish" that is when the running sequences have ended; a newer version may have come by then.

        A generator that was away during a fanout of this loads that version before it serves.

        Raises:
            MissingVersion: the store does not hold the version.
            CorruptWeights: a tensor is not what was published; names it. The old weights stay in use.
            ValueError: its tensors do not fit this model. The old weights stay in use.
            StaleWeights: the engine decodes with another version.
        """
        if self.store is None:
            raise ValueError(
                "this generator has no weight store to update from: start it with store=VersionStore.create()"
            )

        self.updating += 1
        self.asked += 1
        try:
            with phase("update_weights"), self._exit_on_failure():
                loaded = await asyncio.to_thread(self._load_version, self.store, version, self.asked)
                if loaded is None:
                    return self.engine.version  # of a later request
                digest, swapped = loaded
                await asyncio.wrap_future(swapped)
        finally:
            self.updating -= 1

        # What the engine decodes with says which version it is: not what was asked for.
        if self.engine.version <= version and (self.engine.version, self.engine.identity) != (version, digest):
            difference = describe_difference(self.store, version, self.engine.version, self.weights_key)
            raise StaleWeights(
                f"{self.context} was given version {version} ({digest}) and serves version {self.engine.version} "
                f"({self.engine.identity or 'unknown'}){difference}"
            )

        return self.engine.version

    @contextmanager
    def _trace_busy(self) -> Iterator[None]:
        """Yield spans in the trace while at least one request runs: a new one whenever a request ends."""
        if not self.running:
            self.since = time.time()
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            now = time.time()
            if not self.running or now - self.since > SPAN:
                record_span("generate", self.since, now - self.since)
                self.since = now

    @contextmanager
    def _exit_on_failure(self) -> Iterator[None]:
        """Exit if the engine fails: the supervisor replaces this replica."""
        try:
            yield
        except EngineFailed as error:
            traceback.print_exception(error)
            sys.stderr.flush()
            os._exit(1)

    def _load_version(self, store: Store, version: int, number: int) -> tuple[str, Future[None]] | None:
        """Read and check a version while decoding continues; only the swap is left to the engine. None if a later
        request came first: an abandoned one must not bring old weights back. A version of adapters only is merged
        into the weights that this generator started from."""
        from ..engines.weights import read_checkpoint

        with self.loading:
            if number < self.loaded:
                return None
            with store.open(self.weights_key, version) as snapshot:
                tensors = snapshot.tensors()
                if has_adapters(snapshot.manifest.by_name):
                    tensors = merge_adapters(read_checkpoint(Path(self.model)), dict(tensors))
                swapped = self.engine.update_weights(tensors, version, snapshot.digest)
            self.loaded = number
            return snapshot.digest, swapped

    update = update_weights

    @endpoint(catch_up=True)
    async def release(self) -> None:
        """Free the device for a trainer, once the running sequences have ended. New requests wait; the next weight
        update takes the device back."""
        with phase("release"), self._exit_on_failure():
            await asyncio.wrap_future(self.engine.release())

    @endpoint
    async def held(self) -> list[int]:
        """Return seeds of the requests that wait for other weights by their schedules, while nothing else runs."""
        return self.engine.held()

    @endpoint
    async def get_version(self) -> int:
        """Return the version of the weights that this replica decodes with now."""
        return self.engine.version

    @endpoint
    async def stats(self) -> dict[str, Any]:
        """Return counters of the engine."""
        return self.engine.stats()

    def _check_current(self) -> None:
        if isinstance(self.store, VersionStore) and not self.updating:
            check_current(self.store, self.engine.version, str(self.context), self.weights_key)

    def _merge_sampling(self, prompt: Prompt | str | Sequence[int], sampling: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of a request over this generator's; a conversation has tokens that end it."""
        settings = {**self.defaults, **sampling}
        # Of the prompt, as one run may have conversations and plain texts.
        if isinstance(prompt, Prompt) and prompt.stop_ids:
            settings["stop_token_ids"] = tuple(dict.fromkeys((*settings["stop_token_ids"], *prompt.stop_ids)))
        return settings

    def _token_ids(self, prompt: Prompt | str | Sequence[int]) -> Sequence[int]:
        if isinstance(prompt, Prompt):
            return prompt.token_ids
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        return prompt
