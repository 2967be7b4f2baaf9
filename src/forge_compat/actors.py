"""Components with the arguments of Meta's torchforge, instead of `forge.actors`' own."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from forge.actors.reference import ReferenceModel as Reference
from forge.actors.replay_buffer import ReplayBuffer as Buffer
from forge.actors.trainer import Trainer
from forge.config.arguments import check_whole
from forge.data.packing import pack
from forge.runtime.controller import endpoint
from forge.types import Episode

from .torchforge_files import NOTES, leaf_values, note_key, place_key
from .verbs import hint


class ReplayBuffer(Buffer):
    """A buffer that a program polls, with batches in a part for each rank.

    Args:
        batch_size: items of a part.
        dp_size: parts of a batch. Items may be of any class that has a `policy_version`.
        collate: called with the list of parts; its value is what `sample` returns.
        settings: of `forge.actors.ReplayBuffer`.
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
            super().__init__(capacity, **settings)
        except TypeError as error:
            raise TypeError(f"{error}{''.join(map(hint, settings))}") from None
        self.part_size = check_whole(batch_size, "batch_size")
        self.parts = check_whole(dp_size, "dp_size")
        self.collate = collate

    @endpoint
    async def sample(self, curr_policy_version: int) -> Any:  # type: ignore[override]
        """Take `dp_size` parts of `batch_size` items, collated, without waiting; None if there are too few."""
        # What is too old must not count as there.
        await self.expire(curr_policy_version)
        if len(self.items) < self.parts * self.part_size:
            return None
        batch = await super().sample(curr_policy_version, self.parts * self.part_size)
        starts = range(0, len(batch), self.part_size)
        return self.collate([batch[start : start + self.part_size] for start in starts])

    @endpoint
    async def evict(self, curr_policy_version: int) -> None:
        """Drop the items that are too old."""
        await self.expire(curr_policy_version)


class ReferenceModel(Reference):
    """A reference model for padded rows."""

    @endpoint
    def forward(self, input_ids: Any, max_req_tokens: int, return_logprobs: bool = True) -> torch.Tensor:
        """Return log-probabilities of the responses in padded rows, as torchforge's reference model returns them.

        Every token counts, padding too: mask what is padding.

        Args:
            input_ids: token ids [rows, max_req_tokens + response], a tensor or an array.
            max_req_tokens: length of the prompts, at least 1.
            return_logprobs: must be true.

        Returns:
            float32 [rows, response]

        Raises:
            ValueError: rows without a response or a prompt, or return_logprobs is false.
        """
        import torch

        # Logits of a batch would be gigabytes in a message.
        tokens = np.asarray(input_ids)
        if not return_logprobs:
            raise ValueError("forward gives no logits, which are [tokens, vocabulary]: set return_logprobs to True")
        if tokens.ndim != 2 or not 0 < max_req_tokens < tokens.shape[1]:
            raise ValueError(
                f"forward needs input_ids [rows, prompt + response], got {tokens.shape} with max_req_tokens = "
                f"{max_req_tokens}"
            )

        # One sequence a row, whose weights in a loss do not matter here.
        rows = [
            Episode(prompt_ids=row[:max_req_tokens], response_ids=row[max_req_tokens:], reward=0.0, advantage=0.0)
            for row in tokens.tolist()
        ]
        batch = pack(rows)
        scores = self.logprobs(batch)[batch.mask]

        return torch.from_numpy(scores.reshape(len(rows), -1).astype(np.float32))


class TitanTrainer(Trainer):
    """The trainer on TorchTitan's model, by torchforge's name and with its sections.

    Args:
        model: as of `Trainer`, or torchforge's mapping with `hf_assets_path`.
        loss: as of `Trainer`.
        optimizer: as of `Trainer`, or with torchforge's `name` (AdamW), `lr` and `eps`.
        parallelism, **settings: as of `Trainer`. torchforge's sections `training`, `lr_scheduler`, `compile` and
            `activation_checkpoint` are read as `forge convert upstream` reads them; `checkpoint` and `comm` do nothing,
            but for a `checkpoint.load_step`, which is an error that names `load_checkpoint`.

    Raises:
        ValueError: a mapping without the path of a model, or an optimizer's name other than AdamW.
        TypeError: a section has a key without an equivalent; names it.
    """

    constructor_checks = True

    def __init__(self, model: str | Mapping[str, Any], *, loss: Callable[..., Any], **settings: Any) -> None:
        super().__init__(**{"backend": "titan", **trainer_settings({"model": model, "loss": loss, **settings})})


def trainer_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `forge.actors.Trainer` from torchforge's TitanTrainer; others stay as they are.

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
            raise ValueError(f"model needs hf_assets_path, a folder or hub id: it has {dict(model)}")
        arguments["model"] = str(model["hf_assets_path"]).removeprefix("hf://")
    for key, value in leaf_values("", torchforge):
        if key == "checkpoint.load_step" and value not in (None, -1):  # -1: the latest
            raise TypeError(f"TitanTrainer has no setting for {key} = {value!r}: call load_checkpoint with its path")
        if key.startswith(("checkpoint.", "comm.")):
            continue
        target = place_key("train", key, value)
        if target is not None:
            name = target[0].rpartition(".")[2]
            is_pass = name in ("seq_len", "dtype", "compile", "gradient_checkpointing")
            (arguments if is_pass else optimizer)[name] = target[1]
        elif key == "optimizer.name":
            raise ValueError(
                f"optimizer.name must be AdamW, got {value!r:.80}: others are optimizer={{'optimizer': 'module:Class'}}"
            )
        # Others have no effect here, except the schedule's.
        elif value is not None and note_key(key) in (NOTES[""], NOTES["lr_scheduler."]):
            raise TypeError(f"TitanTrainer has no setting for {key} = {value!r} (docs/start/from_torchforge.md)")
    if isinstance(arguments.get("parallelism"), Mapping):
        degrees = arguments["parallelism"].items()
        arguments["parallelism"] = {name: value for name, value in degrees if name != "disable_loss_parallel"}
    return arguments | {"optimizer": optimizer}
