"""The policy as a service: samples completions of prompts, with log-probabilities and the versions of the weights."""

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

from ..config.plugin import resolve
from ..engines import EngineSettings, load_engine
from ..engines.interface import EngineFailed
from ..models.flops import count_causal, forward_flops
from ..models.hub import check_model_name
from ..models.tokenizer import encode_prompt, model_config, open_tokenizer
from ..models.weight_layouts import has_adapters, merge_adapters
from ..observability.metrics import Reduce, phase, record_metric, record_span
from ..runtime.controller import ForgeActor, Options, Service, endpoint
from ..runtime.store import Store, VersionStore
from ..system.devices import find_accelerator
from ..system.extras import find_foreign_name as __getattr__  # noqa: F401  (other names of torchforge)
from ..types import Completion, Prompt, Sampling
from .identity import POLICY, check_current, describe_difference
from .publication import connect_store, controller_store, publish_before_updates
from .staleness import StaleWeights
from .streams import Streams

SPAN = 0.25  # seconds that a span in the trace has at least, while requests run


class Generator(ForgeActor):
    """Component with one generation engine, whose batch runs the requests of all callers.

    Args:
        model: Hugging Face folder or hub id of the first weights (version 0), into which adapters are merged.
        store: the store that new versions are loaded from; None for a policy that never changes.
        weights_key: key of the versions in the store, the same as their trainer's.
        temperature, top_p, top_k, max_tokens, stop_token_ids: defaults of `generate`.
        sampling: other defaults of `generate`, fields of `forge.types.Sampling`.
        colocated: takes turns with a trainer on its device, and is released before each weight update.
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
        colocated: bool = False,
        **settings: Any,
    ) -> None:
        check_model_name(model)
        self.model = model
        self.store_ref = store
        self.weights_key = weights_key
        self.settings = EngineSettings(**settings)
        self.colocated = colocated
        self.store: Store | None = None

        # Weight updates: number in progress, number requested so far, and the latest request that was loaded.
        self.updating = self.asked = self.loaded = 0
        self.loading = threading.Lock()

        # Number of requests that run, and when the current span of the trace started (Unix time).
        self.running = 0
        self.since = 0.0

        self.defaults: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        self.defaults |= {"max_tokens": max_tokens, "stop_token_ids": tuple(stop_token_ids), **(sampling or {})}
        Sampling(**self.defaults)  # a wrong default raises here, before any process starts

    @classmethod
    def place(cls, options: Options, kwargs: dict[str, Any]) -> tuple[Options, dict[str, Any]]:
        """Return the placement of one process that sees the devices of all `procs`, and vLLM settings for that tensor
        parallelism.

        vLLM starts its own workers for one model over several devices.

        Raises:
            ValueError: several processes are asked for, and the engine or other options do not allow them.
        """
        engine_settings = {name: value for name, value in kwargs.items() if name in EngineSettings.model_fields}
        settings = EngineSettings(**engine_settings).over(options.procs)
        if options.procs == 1:
            return options, {"colocated": options.share == "device"} | kwargs
        if options.hosts not in (None, 1) or options.share is not None:
            raise ValueError(
                f"a generator of procs = {options.procs} must be on one host and share no process: omit hosts and share"
            )

        gpus = options.procs if options.with_gpus else 1
        options = Options(**{**options, "procs": 1, "gpus_per_proc": gpus, "hosts": None})
        return options, kwargs | {"vllm": settings.vllm}

    @classmethod
    def started(cls, service: Service, kwargs: Mapping[str, Any]) -> None:
        """Make the trainer publish each version before generators are updated to it, see `forge.actors.publication`."""
        if (store := controller_store(kwargs.get("store"))) is not None:
            publish_before_updates(store, service, kwargs.get("weights_key", POLICY))

    def setup(self) -> None:
        """Open the model, its tokenizer and the engine."""
        import torch

        self.store = connect_store(self.store_ref)
        self.architecture = model_config(self.model)
        self.tokenizer = open_tokenizer(self.model)
        self.special = frozenset(self.tokenizer.all_special_ids)

        device = None
        if self.settings.engine == "embedded" and (kind := find_accelerator()):
            # A process that is shared with a trainer sees the devices of all of these processes.
            device = torch.device(kind.type, self.context.replica % torch.accelerator.device_count())
        self.engine = load_engine(model=self.model, device=device, colocated=self.colocated, **self.settings)
        self.streams = Streams(self.engine)

    def teardown(self) -> None:
        """Close the engine."""
        if hasattr(self, "engine"):
            self.engine.close()

    @endpoint
    async def generate(
        self, prompt: Prompt | str | Sequence[int], n: int | None = None, priority: int = 0, **sampling: Any
    ) -> Completion | list[Completion]:
        """Return completions that are sampled for one prompt.

        Args:
            prompt: a text, which is tokenised here, or a Prompt or token ids, which are taken as they are.
            n: number of completions, which are returned as a list; None returns one Completion.
            priority: of the prompts that wait, the one with the lowest priority starts first.
            sampling: fields of `Sampling` that differ from this generator's defaults.

        Raises:
            ValueError: a sampling setting is invalid, or the prompt leaves no room for a token.
            StaleWeights: this generator missed an update.
        """
        settings = Sampling(n=1 if n is None else n, **self._merge_sampling(prompt, sampling))
        with self._exit_on_failure(), self._trace_busy():
            submitted = self.engine.submit(self._token_ids(prompt), settings, priority=priority)
            completions = await asyncio.wrap_future(submitted)
        self._check_current()

        token_ids = [completion.token_ids for completion in completions]
        texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        for completion, text in zip(completions, texts, strict=True):
            completion.text, completion.sampled_by = text, str(self.context)

        # The prompt is computed once for all completions; each of their tokens attends to it and to those before.
        prompt_length = len(completions[0].prompt_ids)
        lengths = list(map(len, token_ids))
        attended = count_causal(prompt_length) + sum(count_causal(length, prompt_length) for length in lengths)
        flops = forward_flops(self.architecture, prompt_length + sum(lengths), attended, sum(lengths))
        record_metric("generator/tokens", sum(lengths), Reduce.SUM)
        record_metric("generator/flops", flops, Reduce.SUM)

        # The share of special tokens within answers. The one that ends an answer is expected, and does not count.
        for completion in completions:
            answer_ids = completion.token_ids[: -1 if completion.finish == "stop" else None]
            if answer_ids:
                special_count = sum(token in self.special for token in answer_ids)
                record_metric("generation/special_tokens", special_count / len(answer_ids))

        return completions[0] if n is None else completions

    @endpoint
    async def open_stream(
        self, prompt: Prompt | str | Sequence[int], priority: int = 0, stream: int | None = None, **sampling: Any
    ) -> int:
        """Start a request whose tokens are read while they are generated; return the number of its stream.

        `next_pieces` reads it, and `close_stream` closes it, on the same replica only: call all within one `session`.

        Args:
            prompt, priority, sampling: see `generate`; the number of completions, `n`, is among the sampling settings.
            stream: a random number for the stream, which the caller can then close even if the answer to this call is
                lost. None draws one here.

        Raises:
            ValueError: a sampling setting is invalid, or the prompt leaves no room for a token.
        """
        settings = Sampling(**self._merge_sampling(prompt, sampling))
        with self._exit_on_failure():
            return self.streams.open(self._token_ids(prompt), settings, priority, stream)

    @endpoint
    async def next_pieces(self, stream: int) -> list[tuple[int, Completion]]:
        """Return the tokens of a stream since the last call, as (sample, piece) pairs with at most one piece of each
        sample.

        A piece is a Completion without text; its `finish` is "" unless it is the last piece of its sample. The list is
        empty if nothing came within a second.

        Raises:
            StreamLost: the stream is unknown here: another replica has it, or had it and was lost, or it was not read
                for a minute.
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
        """Close a stream and cancel its request; does nothing if the stream is unknown here."""
        self.streams.close(stream)

    @endpoint(catch_up=True)
    async def update_weights(self, version: int) -> int:
        """Load a published version while decoding continues, switch to it, and return the version in use.

        The engine switches between two decoding steps; with `on_update` "finish" once the running sequences have ended,
        when an even newer version may be in use. After an error the old weights stay in use.

        A replica that is being replaced during a fanout of this loads the version before it serves. If a version that
        has the number of the trainer's step was not published yet, the fanout has the trainer publish it first.

        Raises:
            MissingVersion: the store does not have the version.
            CorruptWeights: a tensor differs from what was published; names it.
            ValueError: the version's tensors do not fit this model.
            StaleWeights: the engine still decodes with another version.
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
                if loaded is None:  # a later request came first
                    return self.engine.version
                digest, swapped = loaded
                await asyncio.wrap_future(swapped)
        finally:
            self.updating -= 1

        # The engine itself states with which weights it decodes: the requested version does not prove it.
        if self.engine.version <= version and (self.engine.version, self.engine.identity) != (version, digest):
            difference = describe_difference(self.store, version, self.engine.version, self.weights_key)
            raise StaleWeights(
                f"{self.context} was updated to weight version {version} ({digest}), but still serves version "
                f"{self.engine.version} ({self.engine.identity or 'unknown'}){difference}"
            )

        return self.engine.version

    @contextmanager
    def _trace_busy(self) -> Iterator[None]:
        """Count the block as a running request, and record spans in the trace while at least one request runs.

        A span ends with a request, and once it is longer than SPAN or nothing runs any more.
        """
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
        """End this process if the engine fails within the block: the supervisor then replaces the replica."""
        try:
            yield
        except EngineFailed as error:
            traceback.print_exception(error)
            sys.stderr.flush()
            os._exit(1)

    def _load_version(self, store: Store, version: int, number: int) -> tuple[str, Future[None]] | None:
        """Read and check a weight version, and pass it to the engine; return (digest, future of the switch to it).

        Returns None if a later request was loaded before: an abandoned request must not bring old weights back. A
        version that has only adapters is merged into the weights of this generator's model.

        Args:
            number: of the request, counted from 1.
        """
        from ..engines.weights import is_decodable, read_checkpoint

        with self.loading:
            if number < self.loaded:
                return None

            if self.colocated:  # else a restarted engine would hold its first weights too
                self.engine.release().result()
            with store.open(self.weights_key, version) as snapshot:
                tensors = snapshot.tensors()
                if has_adapters(snapshot.manifest.by_name):
                    is_plain = self.settings.engine != "embedded" or is_decodable(self.architecture)
                    read = read_checkpoint if is_plain else resolve("forge_families.weights:read_parameters", "model")
                    tensors = merge_adapters(read(Path(self.model)), dict(tensors))
                swapped = self.engine.update_weights(tensors, version, snapshot.digest)

            self.loaded = number
            return snapshot.digest, swapped

    update = update_weights

    @endpoint(catch_up=True)
    async def release(self) -> None:
        """Free the device for a trainer, once the running sequences have ended.

        New requests wait until the next weight update, which takes the device back.
        """
        with phase("release"), self._exit_on_failure():
            await asyncio.wrap_future(self.engine.release())

    @endpoint
    async def held(self) -> list[int]:
        """Return the seeds of requests that wait for a scheduled weight version, once no other request runs."""
        return self.engine.held()

    @endpoint
    async def get_version(self) -> int:
        """Return the version of the weights with which this replica decodes now."""
        return self.engine.version

    @endpoint
    async def stats(self) -> dict[str, Any]:
        """Return the engine's counters by name."""
        return self.engine.stats()

    def _check_current(self) -> None:
        if isinstance(self.store, VersionStore) and not self.updating:
            check_current(self.store, self.engine.version, str(self.context), self.weights_key)

    def _merge_sampling(self, prompt: Prompt | str | Sequence[int], sampling: dict[str, Any]) -> dict[str, Any]:
        """Return the sampling settings of a request, with the generator's defaults for settings that the request omits.

        The prompt's own stop tokens are added: one run may have conversations, which end with a token, and plain texts.
        """
        settings = {**self.defaults, "images": getattr(prompt, "images", ()), **sampling}
        if isinstance(prompt, Prompt) and prompt.stop_ids:
            settings["stop_token_ids"] = tuple(dict.fromkeys((*settings["stop_token_ids"], *prompt.stop_ids)))
        return settings

    def _token_ids(self, prompt: Prompt | str | Sequence[int]) -> Sequence[int]:
        if isinstance(prompt, Prompt):
            return prompt.token_ids
        if isinstance(prompt, str):
            return encode_prompt(prompt, self.tokenizer)
        return prompt
