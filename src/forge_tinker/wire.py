"""Messages of the protocol: data and settings of requests to arrays and this library's types, results to protobuf."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forge.types import Sampling

try:
    from tinker.proto import tinker_public_pb2 as protocol
except ImportError as error:
    raise ImportError("forge tinker needs the protocol's package: pip install 'torchforge-rl[agents]'") from error

DTYPES: dict[int, Any] = {
    protocol.DTYPE_FLOAT32: np.float32,
    protocol.DTYPE_INT64: np.int64,
    protocol.DTYPE_INT32: np.int32,
}
MAX_TARGETS = 1024  # of a position
NO_LOGPROB = -99999.0  # the protocol's mark of a position without top log-probabilities


@dataclass
class Datum:
    """A row of `forward_backward`.

    tokens: what the model reads, [length].
    inputs: tensors of the loss by name, [length] or [length, targets]; `target_tokens` among them.
    spans: (sequence id, offset, length) of each run of targets; the id is "" for a prompt's.
    """

    tokens: list[int]
    inputs: dict[str, np.ndarray]
    spans: list[tuple[str, int, int]] = field(default_factory=list)


def parse_pass(body: bytes) -> Any:
    """Return the message of a `forward_backward` request.

    Raises:
        ValueError: the body is malformed.
    """
    message = protocol.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except Exception as error:
        raise ValueError(f"the body is not a ForwardBackwardRequest: {error}") from None
    return message


def read_pass(message: Any) -> tuple[list[Datum], dict[str, float | str]]:
    """Return the data and the loss's settings of a `forward_backward` request.

    Raises:
        ValueError: it is malformed, has parts that are not text, or tensors of the wrong length; names the datum.
    """
    data = []
    for number, row in enumerate(message.data):
        try:
            data.append(_read_datum(row))
        except ValueError as error:
            raise ValueError(f"data[{number}]: {error}") from None

    if not data:
        raise ValueError("data is empty")
    config: dict[str, float | str] = dict(message.loss_fn_config)
    config |= {
        name: value.text if value.WhichOneof("value") == "text" else value.number
        for name, value in message.loss_fn_config_v2.items()
    }
    return data, config


def _read_datum(row: Any) -> Datum:
    tokens: list[int] = []
    for chunk in row.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise ValueError(f"model_input has a chunk of {chunk.WhichOneof('chunk')}: only text is served")
        tokens += np.frombuffer(chunk.encoded_text.tokens, np.int32).tolist()

    inputs = {name: read_tensor(tensor) for name, tensor in row.loss_fn_inputs.items()}
    if "target_tokens" not in inputs:
        raise ValueError("loss_fn_inputs has no 'target_tokens'")
    for name, values in inputs.items():
        if len(values) != len(tokens):
            raise ValueError(f"loss_fn_inputs[{name!r}] has {len(values)} rows, model_input {len(tokens)} tokens")
        if name not in ("target_tokens", "weights") and values.ndim != 1:
            raise ValueError(f"loss_fn_inputs[{name!r}] must have one number a token, it has shape {values.shape}")

    spans = []
    for span in row.loss_fn_input_spans:
        kind = span.WhichOneof("span")
        run = getattr(span, kind)
        spans.append((run.sequence_id if kind == "sampled_tokens" else "", run.offset, run.length))
    return Datum(tokens, inputs, spans)


def read_tensor(message: Any) -> np.ndarray:
    """Return a tensor of the protocol as an array; a sparse one as dense, with zeros.

    Raises:
        ValueError: an unknown data type, or data that are not of its shape.
    """
    if (dtype := DTYPES.get(message.dtype)) is None:
        raise ValueError(f"a tensor has data type {message.dtype}: float32 and int64 are served")
    shape = tuple(message.shape)
    if message.WhichOneof("encoding") != "sparse_csr":
        return np.frombuffer(message.dense, dtype).reshape(shape or -1)

    sparse = message.sparse_csr
    starts, columns = (np.frombuffer(part, np.int64) for part in (sparse.crow_indices, sparse.col_indices))
    if len(shape) != 2 or shape[0] != len(starts) - 1 or not 0 <= shape[1] <= MAX_TARGETS:
        raise ValueError(f"a sparse tensor must be [tokens, at most {MAX_TARGETS}], got {list(shape)}")
    dense = np.zeros(shape, dtype)
    rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    dense[rows, columns] = np.frombuffer(sparse.values, dtype)
    return dense


def write_tensor(message: Any, values: np.ndarray) -> None:
    """Fill a tensor of the protocol, in place, from int64 or float32 values."""
    message.dtype = protocol.DTYPE_INT64 if values.dtype == np.int64 else protocol.DTYPE_FLOAT32
    message.shape.extend(values.shape)
    message.dense = np.ascontiguousarray(values).tobytes()


def write_pass_result(outputs: Sequence[Mapping[str, np.ndarray]], metrics: Mapping[str, float]) -> bytes:
    """Return the result of `forward_backward` as bytes.

    Args:
        outputs: of each datum, tensors by name, float32, [length, ...]; all data have the same names.
        metrics: numbers by `name:reduction`.
    """
    message = protocol.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics.update(metrics)
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(outputs))
    for name, first in outputs[0].items():
        arrays = [np.ascontiguousarray(output[name], np.float32) for output in outputs]
        column = record.fields[name]
        column.dtype = protocol.DTYPE_FLOAT32
        column.trailing_shape.extend(first.shape[1:])
        column.data = b"".join(array.tobytes() for array in arrays)
        column.offsets = np.cumsum([0, *(array.nbytes for array in arrays)]).astype(np.int64).tobytes()
    return message.SerializeToString()


@dataclass
class Scores:
    """Log-probabilities of a prompt's tokens, [length] each, NaN for the first token and those that are not scored.

    top: most probable tokens of each position, [length, k], and their log-probabilities; or None.
    targets: log-probabilities of given tokens, [length - 1, k]; or None.
    drawn: tokens drawn at each position but the first, [length - 1, k], and their log-probabilities; or None.
    """

    logprobs: np.ndarray | None = None
    top: tuple[np.ndarray, np.ndarray] | None = None
    targets: np.ndarray | None = None
    drawn: tuple[np.ndarray, np.ndarray] | None = None


def write_samples(completions: Sequence[Any], scores: Scores, top_k: int) -> bytes:
    """Return the result of `sample` as bytes.

    Args:
        completions: `forge.types.Completion`, with top log-probabilities if `top_k` is not 0.
        scores: of the prompt.
    """
    message = protocol.SampleResponse()
    for completion in completions:
        sequence = message.sequences.add()
        is_cut = completion.finish == "length"
        sequence.stop_reason = protocol.STOP_REASON_LENGTH if is_cut else protocol.STOP_REASON_STOP
        sequence.tokens = np.asarray(completion.token_ids, np.int32).tobytes()
        sequence.logprobs = np.asarray(completion.logprobs, np.float32).tobytes()
        if top_k:
            _write_top(sequence.topk_sampled_logprobs, *_pad_top(completion.top_logprobs, top_k))

    if scores.logprobs is not None:
        message.prompt_logprobs = scores.logprobs.astype(np.float32).tobytes()
    if scores.top is not None:
        _write_top(message.topk_prompt_logprobs, *scores.top)
    if scores.targets is not None:
        write_tensor(message.target_prompt_logprobs, scores.targets)
    if scores.drawn is not None:
        write_tensor(message.prompt_alt_tokens.tokens, scores.drawn[0])
        write_tensor(message.prompt_alt_tokens.logprobs, scores.drawn[1])
    return message.SerializeToString()


def _write_top(message: Any, tokens: np.ndarray, logprobs: np.ndarray) -> None:
    message.length, message.k = tokens.shape
    message.token_ids = tokens.astype(np.int32).tobytes()
    message.logprobs = logprobs.astype(np.float32).tobytes()


def _pad_top(top_logprobs: Sequence[Mapping[int, float]], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and log-probabilities of each position, [positions, k], the most probable first."""
    rows = [[*position.items()][:k] + [(0, NO_LOGPROB)] * (k - len(position)) for position in top_logprobs]
    pairs = np.array(rows, np.float64).reshape(len(rows), k, 2)
    return pairs[..., 0], pairs[..., 1]


def read_targets(tensor: Any, length: int) -> np.ndarray:
    """Return the tokens that `target_prompt_logprobs` names, [length - 1, k], -1 where it names none.

    Raises:
        ValueError: it has another shape.
    """
    shape = tuple(tensor.shape or ())
    if len(shape) != 2 or shape[0] != length - 1:
        raise ValueError(f"target_prompt_logprobs must be [{length - 1}, K] for this prompt, got {list(shape)}")
    if tensor.sparse_crow_indices is None:
        return np.asarray(tensor.data, np.int64).reshape(shape)
    tokens = np.full(shape, -1, np.int64)
    rows = np.repeat(np.arange(shape[0]), np.diff(tensor.sparse_crow_indices))
    tokens[rows, tensor.sparse_col_indices] = tensor.data
    return tokens


def make_sampling(request: Any, seed: int, room: int) -> Sampling:
    """Return the engine's settings of a `sample` request.

    Args:
        room: tokens that fit after the prompt.

    Raises:
        ValueError: a setting that the engine does not have.
    """
    params = request.sampling_params
    stop = params.stop
    if stop is not None and not len(stop):
        raise ValueError("stop=[] is not served: an answer always ends at the model's end-of-sequence token")
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    return Sampling(
        n=request.num_samples,
        max_tokens=max(1, room) if params.max_tokens is None else params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        stop=tuple(text for text in stops if isinstance(text, str)),
        stop_token_ids=tuple(token for token in stops if isinstance(token, int)),
        seed=seed,
        top_logprobs=request.topk_sample_logprobs,
        logprobs_of="policy",
    )
