"""The model that a run exported, held to its last checkpoint and to the model that it began with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forge.engines.weights import read_checkpoint
from forge.models.tokenizer import model_config
from forge.models.weight_layouts import split_experts

from .recorded import RecordedRun
from .weights import Store

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# What an export may change: the file's own notes, and the dtype of the weights.
FREE = {"_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache", "pad_token_id"}


def saved_faults(run: RecordedRun, store: Store) -> list[str]:
    """Faults of the exported model, one line each: another configuration, or a tensor that is not the checkpoint's."""
    folder = run.saved_model
    if folder is None:
        return []
    before, after = (_config(model_config(path)) for path in (run.start, folder))
    faults = [
        f"the saved model: config.json has {key} = {after.get(key)!r}, and the model that training began with has "
        f"{before.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]
    last = max(run.versions)
    steps = run.settings.get("training.steps")
    if not last or steps is None or last != int(steps):
        return faults
    # The checkpoint of the last step has the weights that were exported.
    expected = dict(split_experts(store.version(last).tensors.items()))
    for name, tensor in read_checkpoint(folder):
        exported = expected.get(name)
        if exported is None:
            continue
        if exported.shape != tensor.shape or not exported.to(tensor.dtype).equal(tensor):
            twin = next((second_name for second_name, values in expected.items() if values.equal(tensor.float())), None)
            hint = "" if twin is None else f": it is {twin}"
            faults.append(f"the saved model: {name} is not that of checkpoint step_{last:06d}{hint}")
            break
    return faults


def _config(config: PreTrainedConfig) -> dict[str, Any]:
    """The settings by name, with transformers' defaults: releases write them in other ways."""
    return {key: value for key, value in config.to_dict().items() if key not in FREE and value is not None}
