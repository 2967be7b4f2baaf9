"""`trainer.backend: tinker`: a run whose adapter is trained and sampled by a server of Tinker's protocol.

Loss, schedule, rewards and record stay in the run.
"""

import math
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .wire import protocol  # noqa: F401  # isort: skip (it names a missing package with its fix)
import numpy as np
import tinker
import torch
from safetensors.torch import load
from tinker.lib.base_url import resolve_base_url
from torch import Tensor

from forge.engines.interface import Listener, check_length, check_prompt, check_request
from forge.engines.weights import load_eos, read_checkpoint, read_config
from forge.models.hub import split_revision
from forge.models.weight_layouts import merge_adapters
from forge.training.policy import TokenScores
from forge.training.trainer import PolicyTrainer
from forge.types import Batch, Completion, Sampling

from .adapters import WEIGHTS, scale_factors

PATH = "tinker_path"  # of published weights: their only tensor, the bytes of a path
LIFETIME = 24 * 3600  # seconds that published weights live
ANSWER = 30.0  # seconds in which the server must answer at the start and the end
# Settings of a sample that the protocol lacks. It has texts that end one, but none besides tokens that do.
FOREIGN = ("grammar", "repetition_penalty", "stop", "schedule", "images")


class TinkerTrainer(PolicyTrainer):
    """Trains an adapter of a model at the server that the environment names, by TINKER_BASE_URL.

    Log-probabilities come from there. A loss and its gradient with respect to them are computed here; a cross-entropy
    whose weights are that gradient has the same gradient there.
    """

    def __init__(self, *args: Any, base_model: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._base_model = split_revision(base_model)[0]
        self.policy.routers = None
        # The server divides a batch as its memory needs: one micro-batch takes the fewest requests.
        self.passes = self.passes.model_copy(update={"seq_len": 2**31})
        self._service = tinker.ServiceClient()
        self._client: Any = None
        self._published: Any = None  # path of the current weights, once they are published
        self._exported: Any = None  # their factors, once they were read
        self._scored: Any = None  # the batch of an update, with its log-probabilities

    @property
    def client(self) -> Any:
        """Return the client of the adapter in training; the first use makes one."""
        if self._client is None:
            self._client = self._service.create_lora_training_client(
                self._base_model,
                rank=self.lora.rank,  # type: ignore[union-attr]
                seed=0,
                train_unembed=False,
            ).result()
        return self._client

    def weights(self) -> dict[str, Tensor]:
        """Return the path of the current weights, which are saved for samplers, as a tensor of bytes."""
        if self._published is None:
            name = f"step-{self.step}-{time.time_ns()}"
            self._published = self.client.save_weights_for_sampler(name, ttl_seconds=LIFETIME).result().path
        return {PATH: torch.tensor([*self._published.encode()], dtype=torch.uint8)}

    def export_weights(self, *, meta: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator of (name, tensor) of the local base model, with the adapter merged, as `PolicyTrainer`."""
        if self._exported is None:
            name = f"step-{self.step}-{time.time_ns()}"
            path = self.client.save_weights_external(name, ttl_seconds=LIFETIME).result().path
            urls = tinker.RestClient().get_external_weights_urls(path).result().urls
            with urllib.request.urlopen(urls[WEIGHTS], timeout=ANSWER) as answer:
                self._exported = scale_factors(load(answer.read()))
        merged = merge_adapters(read_checkpoint(Path(self._model)), self._exported)
        return ((name, tensor.to("meta")) for name, tensor in merged) if meta else merged

    def save_state(self) -> str:
        """Save weights and optimiser at the server, and return their path there."""
        return self.client.save_state(f"step-{self.step}", overwrite=True).result().path

    def load_state(self, path: str) -> None:
        """Continue with weights and optimiser that `save_state` saved."""
        self._client = self._service.create_training_client_from_state_with_optimizer(path).result()
        self._published = self._exported = None

    def close(self) -> None:
        """End the session, by which the server frees the adapter; what was saved stays."""
        self._service.close("success").result(ANSWER)

    def _forward_batch(self, batch: Batch) -> TokenScores:
        outputs = self.client.forward(make_data(batch, np.zeros(len(batch.tokens))), "cross_entropy").result()
        masks = np.split(batch.mask, np.cumsum(batch.lengths)[:-1])
        logprobs = torch.cat(
            [
                output["logprobs"].to_torch()[mask[1:]]
                for output, mask in zip(outputs.loss_fn_outputs, masks, strict=True)
            ]
        )
        if torch.is_grad_enabled():
            self._scored = batch, logprobs.requires_grad_()
        # The mean of -log p over tokens that the policy has sampled estimates its entropy.
        return TokenScores(logprobs, -logprobs.detach())

    def _apply_update(self, total: Tensor, rate: float) -> dict[str, float]:
        (batch, logprobs), loss, settings = self._scored, float(total), self.settings
        if not (math.isfinite(loss) and logprobs.grad.isfinite().all()):
            raise FloatingPointError(f"step {self.step}: loss {loss} or its gradient; the update was not applied")

        gradient = np.zeros(len(batch.tokens), np.float32)
        gradient[batch.mask] = logprobs.grad
        # Waited for: a step after a pass that failed would apply a part of the gradient.
        self.client.forward_backward(make_data(batch, -gradient), "cross_entropy").result()
        stepped = self.client.optim_step(
            tinker.AdamParams(
                learning_rate=rate,
                beta1=settings.beta1,
                beta2=settings.beta2,
                eps=settings.epsilon,
                weight_decay=settings.weight_decay,
                grad_clip_norm=settings.max_grad_norm,
            )
        )
        self._published = self._exported = None
        return {"loss": loss, "grad_norm": (stepped.result().metrics or {}).get("grad_norm:mean", 0.0)}


class TinkerEngine:
    """An `Engine` whose completions are sampled by the server that the environment names, by TINKER_BASE_URL.

    Args:
        model: folder of the base model, whose configuration is read.
        slots: requests that are open at once.
        settings: fields of `EngineSettings`, of which only `max_seq_len` is read.
    """

    def __init__(self, model: str | Path, *, version: int = 0, slots: int = 256, **settings: Any) -> None:
        config = read_config(Path(model))
        self._vocabulary, self.eos = config.get_text_config().vocab_size, load_eos(Path(model), config)
        self.max_seq_len = check_length(config, settings.get("max_seq_len"))
        self.version, self.identity = version, ""
        self._service, self._threads = tinker.ServiceClient(), ThreadPoolExecutor(slots)
        self._sampler: Any = None
        self._open: set[Future[list[Completion]]] = set()
        self._generated = 0  # tokens

    def submit(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, priority: int = 0, listener: Listener | None = None
    ) -> Future[list[Completion]]:
        """Start the completions of a prompt, as `Engine.submit`; they end with the weights that they began with.

        Raises:
            ValueError: also for a setting that the protocol lacks.
        """
        prompt = check_prompt(prompt_ids, self._vocabulary, self.max_seq_len)
        check_request(sampling, priority, self._vocabulary)
        for name in FOREIGN:
            if getattr(sampling, name) != getattr(Sampling(), name):
                raise ValueError(f"{name}: samples of a Tinker server have no such setting, omit it")
        weights = self._sampler, self.version, self.identity
        drawn = self._threads.submit(self._draw, *weights, prompt, sampling, listener or (lambda *_: None))
        self._open.add(drawn)
        drawn.add_done_callback(self._open.discard)
        return drawn

    def _draw(
        self,
        sampler: Any,
        version: int,
        identity: str,
        prompt: tuple[int, ...],
        sampling: Sampling,
        listener: Listener,
    ) -> list[Completion]:
        params = tinker.SamplingParams(
            max_tokens=min(sampling.max_tokens, self.max_seq_len - len(prompt)),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            stop=[*self.eos, *sampling.stop_token_ids] or None,
            seed=None if sampling.seed is None else sampling.seed % 2**31,
        )
        drawn = sampler.sample(
            tinker.ModelInput.from_ints([*prompt]), sampling.n, params, topk_sample_logprobs=sampling.top_logprobs
        ).result()
        completions = [
            Completion(
                token_ids=sequence.tokens,
                logprobs=sequence.logprobs,
                prompt_ids=prompt,
                versions=[version] * len(sequence.tokens),
                finish="length" if sequence.stop_reason == "length" else "stop",
                identities={version: identity},
                top_logprobs=[dict(position or ()) for position in sequence.topk_logprobs or ()],
            )
            for sequence in drawn.sequences
        ]
        for sample, completion in enumerate(completions):
            listener(sample, completion)
        self._generated += sum(len(completion.token_ids) for completion in completions)
        return completions

    def update_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int, identity: str = ""
    ) -> Future[None]:
        """Sample by the weights at a published path from now on; requests that are open keep theirs."""
        path = bytes(dict(named_tensors)[PATH].tolist()).decode()
        sampler = self._service.create_sampling_client(model_path=path).result()
        self._sampler, self.version, self.identity = sampler, version, identity
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def stats(self) -> dict[str, int]:
        """Return the counters of `Engine.stats`, of whole requests; which of them wait only the server knows."""
        return {"running": len(self._open), "waiting": 0, "generated_tokens": self._generated}

    def close(self) -> None:
        """Drop the requests that have not started, and end the session."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._service.close("success").result(ANSWER)


def make_data(batch: Batch, weights: np.ndarray) -> list[tinker.Datum]:
    """Return each sequence of a batch as a datum of the loss cross_entropy, with these weights of its tokens."""
    targets = batch.tokens if batch.targets is None else batch.targets
    ends = np.cumsum(batch.lengths)
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(batch.tokens[start : end - 1].tolist()),
            loss_fn_inputs={
                "target_tokens": targets[start + 1 : end].astype(np.int64),
                "weights": weights[start + 1 : end].astype(np.float32),
            },
        )
        for start, end in zip(ends - batch.lengths, ends, strict=True)
    ]


def check_address(base_model: str) -> None:
    """Check that the server which the environment names answers, and trains adapters of this model.

    Raises:
        ValueError: it does not; the message says what to do.
    """
    address = resolve_base_url()
    try:
        # The client itself would try for five minutes.
        urllib.request.urlopen(f"{address}/api/v1/healthz", timeout=ANSWER).close()
        capabilities = tinker.RestClient(base_url=address).get_server_capabilities().result()
    except Exception as error:
        raise ValueError(
            f"trainer.backend tinker: {address}: {error}; set TINKER_BASE_URL and TINKER_API_KEY to a server's"
        ) from error
    names = [str(model.model_name) for model in capabilities.supported_models]
    if split_revision(base_model)[0] not in names:
        raise ValueError(
            f"model: the server has no {base_model}: set one of {', '.join(names)}, or forge tinker --name"
        )
