"""Components with the arguments of Meta's torchforge, instead of `forge.actors`' own."""

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from forge.actors import Generator as Policy, ReferenceModel as Reference, ReplayBuffer as Buffer, Trainer
from forge.config.arguments import check_whole
from forge.config.sections import flatten_config
from forge.data.packing import pack
from forge.losses import SimpleGRPOLoss
from forge.runtime.controller import Options, endpoint
from forge.types import Completion, Episode

from .store import default_store
from .torchforge_files import ENGINE_KEYS, NOTES, note_key, place_key
from .upstream import TokenLogits
from .verbs import hint

log = logging.getLogger(f"forge.{__name__}")

REFERENCE = ("model", "parallelism", "seq_len", "dtype")  # arguments of the trainer that a reference model has as well


class ReplayBuffer(Buffer):
    """A replay buffer that a program polls, and whose batches have a part for each rank, as torchforge's.

    Args:
        batch_size: number of items in a part. Items may be of any class that has a `policy_version`.
        dp_size: number of parts in a batch.
        collate: called with the list of parts; `sample` returns its result.
        capacity, **settings: of `forge.actors.ReplayBuffer`; the default `order` is "random", as in torchforge.
    """

    constructor_checks = True

    def __init__(
        self,
        batch_size: int,
        dp_size: int = 1,
        collate: Callable[[list[list[Any]]], Any] = list,
        *,
        capacity: int = 4096,
        **settings: Any,
    ) -> None:
        try:
            super().__init__(capacity, **{"order": "random", **settings})
        except TypeError as error:
            raise TypeError(f"{error}{''.join(map(hint, settings))}") from None
        self.part_size, self.parts = check_whole(batch_size, "batch_size"), check_whole(dp_size, "dp_size")
        self.collate = collate

    @endpoint
    async def sample(self, curr_policy_version: int) -> Any:  # type: ignore[override]
        """Remove a batch from the buffer and return it collated; None, without waiting, if there are too few items."""
        # First, as items that are too old must not count.
        await self.expire(curr_policy_version)
        if len(self.items) < self.parts * self.part_size:
            return None
        batch = await super().sample(curr_policy_version, self.parts * self.part_size)
        return self.collate([batch[i : i + self.part_size] for i in range(0, len(batch), self.part_size)])

    @endpoint
    async def evict(self, curr_policy_version: int) -> None:
        """Drop the items that are too old for the given version of the policy."""
        await self.expire(curr_policy_version)


class ReferenceModel(Reference):
    """A reference model for padded rows."""

    @endpoint
    def forward(self, input_ids: Any, max_req_tokens: int, return_logprobs: bool = True) -> torch.Tensor:
        """Return log-probabilities of the responses in padded rows, as torchforge's reference model returns them.

        Padding is scored as any other token, so the caller masks it.

        Args:
            input_ids: token ids [rows, max_req_tokens + response], a tensor or an array.
            max_req_tokens: length of the prompts, at least 1.
            return_logprobs: must be true.

        Returns:
            float32 [rows, response]

        Raises:
            ValueError: rows without a response or a prompt, or return_logprobs is false.
        """
        # Logits are not returned: those of a batch would be a message of gigabytes.
        tokens = np.asarray(input_ids)
        if not return_logprobs:
            raise ValueError("forward cannot return logits, only log-probabilities: set return_logprobs to True")
        if tokens.ndim != 2 or not 0 < max_req_tokens < tokens.shape[1]:
            raise ValueError(
                f"forward needs input_ids [rows, prompt + response], got {tokens.shape} with max_req_tokens = "
                f"{max_req_tokens}"
            )

        # Each row is a sequence; reward and advantage do not matter here.
        rows = [
            Episode(prompt_ids=row[:max_req_tokens], response_ids=row[max_req_tokens:], reward=0.0, advantage=0.0)
            for row in tokens.tolist()
        ]
        batch = pack(rows)

        return torch.from_numpy(self.logprobs(batch)[batch.mask].reshape(len(rows), -1).astype(np.float32))


class LogitsLoss:
    """Adapter of a torchforge loss over logits to a loss over the log-probabilities of padded rows.

    The logits are `TokenLogits`, from which `forge.util.ops.compute_logprobs` reads log-probabilities.
    """

    aggregation = "sequence_mean"  # each row of torchforge's batches has an equal share

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        self.loss = loss
        self.parameters = inspect.signature(loss).parameters
        # The trainer passes tensors by the names of the parameters.
        renamed = {"logits": "logprobs", "response": "tokens"}
        parameters = [
            p.replace(name=renamed.get(p.name, p.name), kind=p.KEYWORD_ONLY) for p in self.parameters.values()
        ]
        if "response" not in self.parameters:
            parameters.append(inspect.Parameter("tokens", inspect.Parameter.KEYWORD_ONLY))
        self.__signature__ = inspect.Signature(parameters)

    def __call__(self, *, logprobs: torch.Tensor, tokens: torch.Tensor, **tensors: Any) -> torch.Tensor:
        """Return the loss of rows [rows, response]."""
        if "response" in self.parameters:
            tensors["response"] = tokens
        return self.loss(logits=TokenLogits(logprobs, tokens), **tensors)


class TitanTrainer(Trainer):
    """The trainer with the name and the sections of settings that torchforge uses, on TorchTitan's model where that is
    installed. Its versions go to the store of the run, `forge.store`.

    Args:
        model: as in `Trainer`, or torchforge's mapping with `hf_assets_path`.
        loss: as in `Trainer`, or a function with a parameter `logits`, see `LogitsLoss`; by default SimpleGRPOLoss.
        **settings: as in `Trainer`; `optimizer` may also have torchforge's `name` (AdamW), `lr` and `eps`. Its sections
            `training`, `lr_scheduler`, `compile` and `activation_checkpoint` are read as by `forge convert upstream`;
            `checkpoint` and `comm` have no effect, except that `checkpoint.load_step` is an error.

    Raises:
        ValueError: `model` is a mapping without the path of a model, or the optimizer is not AdamW.
        TypeError: a section has a key without an equivalent; the message names it.
    """

    constructor_checks = True

    def __init__(
        self, model: str | Mapping[str, Any], *, loss: Callable[..., Any] | None = None, **settings: Any
    ) -> None:
        loss = SimpleGRPOLoss() if loss is None else loss
        if callable(loss) and "logits" in inspect.signature(loss).parameters:
            loss = LogitsLoss(loss)
        backend = "titan" if find_spec("torchtitan") else "fsdp"
        super().__init__(**{"backend": backend, **trainer_settings({"model": model, "loss": loss, **settings})})

    @classmethod
    def place(cls, options: Options, kwargs: dict[str, Any]) -> tuple[Options, dict[str, Any]]:
        """Return the placement unchanged, and the arguments with the store of the run."""
        return options, {"store": default_store(), **kwargs}

    @endpoint
    def push_weights(self, policy_version: int) -> None:
        """Publish the current weights as a version, see `Trainer.push_weights`."""
        super().push_weights(policy_version)


@dataclass(slots=True)
class TensorCompletion(Completion):
    """A completion whose token ids and log-probabilities are tensors, with the text of its prompt, as torchforge's."""

    prompt: str = ""


class Generator(Policy):
    """A generator that answers each prompt with a list of `n` completions, whose token ids are tensors.

    Args:
        n: number of completions of a call without `n`.
        **settings: of `forge.actors.Generator`.
    """

    constructor_checks = True

    def __init__(self, model: str, *, n: int = 1, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.samples = check_whole(n, "n")

    @endpoint
    async def generate(  # type: ignore[override]
        self, prompt: Any, n: int | None = None, priority: int = 0, **sampling: Any
    ) -> list[Completion]:
        """Return completions of a prompt, see `forge.actors.Generator.generate`."""
        completions: Any = await super().generate(prompt, self.samples if n is None else n, priority, **sampling)
        return [
            TensorCompletion(
                **{
                    **{field.name: getattr(completion, field.name) for field in fields(completion)},
                    "prompt_ids": torch.tensor(completion.prompt_ids),
                    "token_ids": torch.tensor(completion.token_ids),
                    "logprobs": torch.tensor(completion.logprobs),
                    "prompt": str(prompt),
                }
            )
            for completion in completions
        ]

    @endpoint(catch_up=True)
    async def update_weights(self, version: int | None = None, policy_version: int | None = None) -> int:
        """Load a version, which has two names, see `forge.actors.Generator.update_weights`."""
        number = policy_version if version is None else version
        if number is None:
            raise TypeError("update_weights needs a policy version (a number)")
        return await super().update_weights(number)


def convert_arguments(name: str, arguments: Mapping[str, Any]) -> tuple[type, dict[str, Any]]:
    """Return the class with torchforge's behaviour for a component of torchforge's, and its arguments.

    Args:
        name: of the component: "Generator", "ReplayBuffer" or "ReferenceModel".

    Raises:
        TypeError: an argument has no equivalent.
        ValueError: a value is invalid.
    """
    if name == "ReplayBuffer":
        return ReplayBuffer, dict(arguments)
    if name == "ReferenceModel":
        settings = trainer_settings(arguments)
        return ReferenceModel, {key: settings[key] for key in REFERENCE if key in settings}
    return Generator, generator_settings(arguments)


def generator_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Generator` for torchforge's, with vLLM as the engine where vLLM is installed.

    Raises:
        TypeError: an argument has no equivalent.
        ValueError: `engine_args` has no model, or divides it over processes that the embedded engine does not have.
    """
    settings = dict(arguments)
    engine = dict(settings.pop("engine_args", None) or settings.pop("engine_config", None) or {})
    sampling = dict(settings.pop("sampling_params", None) or settings.pop("sampling_config", None) or {})
    for unused in ("use_dcp_for_weight_sync", "prefetch_weights_to_shm", "n_fetcher_procs"):
        settings.pop(unused, None)  # weights are in shared memory in any case
    model = engine.pop("model", None) or settings.get("model")
    if not model:
        raise ValueError(f"engine_args needs the key model (a directory or hub id), got {engine}")
    settings["model"] = str(model).removeprefix("hf://")
    settings |= {ours: engine.pop(theirs) for theirs, ours in ENGINE_KEYS.items() if theirs in engine}

    # What only vLLM has.
    if find_spec("vllm"):
        settings |= {"engine": "vllm", "vllm": engine}
    elif max(engine.pop("tensor_parallel_size", 1), engine.pop("pipeline_parallel_size", 1)) > 1:
        raise ValueError("a model over several processes needs vLLM (docs/engines.md): set tensor_parallel_size to 1")
    elif engine:
        log.info("vLLM is not installed, so these engine_args have no effect: %s", ", ".join(sorted(engine)))

    return {"store": default_store(), "n": sampling.pop("n", 1), "sampling": sampling, **settings}


def trainer_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `forge.actors.Trainer` that correspond to those of torchforge's TitanTrainer.

    Args:
        settings: of either; arguments of `Trainer` are returned as they are. Those of its ReferenceModel are also
            accepted.

    Raises:
        ValueError: `model` is a mapping without hf_assets_path, or the optimizer's name is not AdamW.
        TypeError: a section has a key without an equivalent.
    """
    # `optimizer` and `parallelism` are sections of `Trainer` as well, whose keys differ.
    sections = ("training", "lr_scheduler", "compile", "checkpoint", "activation_checkpoint", "comm")
    torchforge = {name: settings[name] for name in sections if isinstance(settings.get(name), Mapping)}
    arguments = {name: value for name, value in settings.items() if name not in torchforge}
    optimizer = arguments.pop("optimizer", None) or {}
    if not isinstance(optimizer, Mapping):
        raise TypeError(f"optimizer must be a mapping of its settings, got {optimizer!r:.80}")
    renamed = {name: value for name, value in optimizer.items() if name in ("name", "lr", "eps")}
    optimizer = {name: value for name, value in optimizer.items() if name not in renamed}
    torchforge |= {"optimizer": renamed} if renamed else {}

    model = arguments["model"]
    if isinstance(model, Mapping):
        if not model.get("hf_assets_path"):
            raise ValueError(f"model needs the key hf_assets_path (a directory or hub id), got {dict(model)}")
        arguments["model"] = str(model["hf_assets_path"]).removeprefix("hf://")

    # Each key of torchforge's sections is an argument of `Trainer`, a key of its optimizer, or an error.
    for key, value in flatten_config(torchforge).items():
        if key == "checkpoint.load_step" and value not in (None, -1):  # -1: the latest
            raise TypeError(
                f"TitanTrainer has no setting for {key} = {value!r}: call load_checkpoint with the checkpoint's path"
            )
        if key.startswith(("checkpoint.", "comm.")):
            continue
        target = place_key("train", key, value)
        if target is not None:
            name = target[0].rpartition(".")[2]
            is_argument = name in ("seq_len", "dtype", "compile", "gradient_checkpointing")
            (arguments if is_argument else optimizer)[name] = target[1]
        elif key == "optimizer.name":
            raise ValueError(
                f"optimizer.name must be AdamW, got {value!r:.80}: others are optimizer={{'optimizer': 'module:Class'}}"
            )
        # Other keys that have a note have no effect here, except those of the schedule.
        elif value is not None and note_key(key) in (NOTES[""], NOTES["lr_scheduler."]):
            raise TypeError(f"TitanTrainer has no setting for {key} = {value!r} (docs/start/from_torchforge.md)")

    if isinstance(arguments.get("parallelism"), Mapping):
        degrees = arguments["parallelism"].items()
        arguments["parallelism"] = {name: value for name, value in degrees if name != "disable_loss_parallel"}
    return arguments | {"optimizer": optimizer}
