"""Validation of OpenAI requests: a setting that this server would ignore is an error."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import signature

from ..config.plugin import nearest
from ..data.chat import ChatFormat
from ..data.special_tokens import SpecialTokens, whole
from ..system.web import Json
from ..types import TOP_LOGPROBS, Sampling
from .text import Tokenizer

# Settings of sampling with the defaults of OpenAI's interface.
SAMPLING: dict[str, Json] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": (), "seed": None}
COMMON = {"model", "n", "stop", "stream", "stream_options", "max_tokens", "logprobs", "priority", *SAMPLING}
# Fields without effect on the tokens, or with an effect that is always on.
HARMLESS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "return_token_ids"}
# Unsupported fields, with the values that are accepted because they change nothing.
ABSENT: dict[str, tuple[Json, ...]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "min_p": (0, None),
    "logit_bias": (None, {}),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "ignore_eos": (None, False),
    "modalities": (None, ["text"]),
    "reasoning_effort": (None,),
}
# Fields with a number, and the type that it must have.
NUMBERS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("n", "max_tokens", "max_completion_tokens", "best_of", "top_k", "top_logprobs"), int),
    **dict.fromkeys(("seed", "priority"), int),
    **dict.fromkeys(("temperature", "top_p"), (int, float)),
}
# Limits of one request, far above those of clients: a larger one would occupy the server's thread for seconds.
MAX_SAMPLES = 4096
MAX_STOPS = 16  # stop strings
MAX_STOP_LENGTH = 256  # characters of a stop string
MAX_STOP_TOKENS = 1024
MAX_MESSAGES = 4096
MAX_TEXT = 1 << 20  # characters of a prompt or of a chat, and token ids of a prompt
MAX_REPEATED = 1 << 22  # tokens of the prompts in a response, which contains them once for each sample
MAX_SHOWN = 60  # characters of a value in an error
# Fields of one of the two interfaces alone.
COMPLETIONS = {"prompt", "echo", "best_of"}
CHAT = {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"}


class BadRequest(ValueError):
    """An invalid request; `param` is the field at fault."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """A parsed request: `n` samples of each prompt.

    stop: strings; the text ends before the first of them. usage: whether a stream ends with a chunk of token counts.
    """

    prompts: list[list[int]]
    sampling: Sampling
    stop: list[str]
    logprobs: bool
    chat: bool
    echo: bool = False
    stream: bool = False
    usage: bool = False
    priority: int = 0


def parse(body: Json, tokenizer: Tokenizer, model: str, *, chat: bool) -> GenerationJob:
    """Parse the body of a request to `/v1/completions` or, with `chat`, `/v1/chat/completions`.

    Raises:
        BadRequest: names the field and the remedy.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    supported = COMMON | (CHAT if chat else COMPLETIONS)
    # Every field is known, and has a value that this server honours.
    for name, value in body.items():
        if name in ABSENT and value not in ABSENT[name]:
            raise BadRequest(f"{name} = {shorten(value)} is not supported", name)
        if name not in supported | HARMLESS | ABSENT.keys():
            hint = nearest(name[:MAX_SHOWN], sorted(supported))
            raise BadRequest(f"unknown field {shorten(name)}{hint}", name[:MAX_SHOWN])
        if value is not None and name in NUMBERS:
            _check_number(name, value)
        if name in ("echo", "stream") and value not in (None, True, False):
            raise BadRequest(f"{name} must be true or false, got {shorten(value)}", name)
    if body.get("model") not in (None, model):
        raise BadRequest(f"model {shorten(body['model'])} is not served here: ask for {model!r}", "model", 404)
    if body.get("best_of") not in (None, body.get("n") or 1):
        raise BadRequest("best_of other than n is not supported: ask for n samples and choose", "best_of")
    stop = _stop(body.get("stop"))
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or options.keys() - {"include_usage"}:
        raise BadRequest("stream_options supports only include_usage", "stream_options")
    samples = max(1, body.get("n") or 1)
    prompts = [_messages(body, tokenizer)] if chat else _prompts(body.get("prompt"), tokenizer, samples)
    top_logprobs = _logprobs(body, chat)
    sampling = _sampling(body, chat, top_logprobs or 0)
    # A model's own eos is often not what ends a turn.
    if chat:
        stop_ids = (*sampling.stop_token_ids, *_ends_of_turns(tokenizer, str(tokenizer.chat_template)))
        sampling = replace(sampling, stop_token_ids=tuple(dict.fromkeys(stop_ids)))
    # A short request may ask for a long answer: both are limited before anything is generated.
    _check_count(len(prompts), sampling.n)
    size = sum(map(len, prompts)) * sampling.n
    if size > MAX_REPEATED:
        raise BadRequest(
            f"the answer would repeat {size} tokens of prompts, more than {MAX_REPEATED}: ask for fewer samples at "
            "once",
            "n",
        )
    return GenerationJob(
        prompts,
        sampling,
        stop,
        top_logprobs is not None,
        chat,
        echo=bool(body.get("echo")),
        stream=bool(body.get("stream")),
        usage=bool(options.get("include_usage")),
        priority=body.get("priority") or 0,
    )


def _check_count(prompts: int, samples: int) -> None:
    if prompts * samples > MAX_SAMPLES:
        raise BadRequest(f"{prompts} prompts of {samples} samples are more than {MAX_SAMPLES} in one request", "n")


def _check_number(name: str, value: Json) -> None:
    """Raise BadRequest if the value of a field is not a number, or has more than 64 bits."""
    if isinstance(value, bool) or not isinstance(value, NUMBERS[name]):
        raise BadRequest(f"{name} must be a number{' without a fraction' * (NUMBERS[name] is int)}", name)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise BadRequest(f"{name} must be a number of at most 64 bits", name)


def _stop(stop: Json) -> list[str]:
    stop = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stop, list) or not all(isinstance(item, str) and item for item in stop):
        raise BadRequest("stop must be a string or a list of strings that are not empty", "stop")
    if len(stop) > MAX_STOPS:
        raise BadRequest(f"stop must be at most {MAX_STOPS} strings, got {len(stop)}", "stop")
    longest = max(map(len, stop), default=0)
    if longest > MAX_STOP_LENGTH:
        raise BadRequest(f"stop strings must have at most {MAX_STOP_LENGTH} characters, got {longest}", "stop")
    return stop


def shorten(value: Json) -> str:
    """Format a value of a request for an error: at most its first characters."""
    text = repr(value[:MAX_SHOWN] if isinstance(value, str | list) else value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _sampling(body: dict[str, Json], chat: bool, top_logprobs: int) -> Sampling:
    """Read the sampling settings, with OpenAI's defaults and not the generator's: clients expect those."""
    # OpenAI's limits: 16 tokens of a completion; of a chat as many as fit into the model.
    limits = [body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    limit = limits[0] if limits else (1 << 20 if chat else 16)
    values = {name: default if body.get(name) is None else body[name] for name, default in SAMPLING.items()}
    values["top_k"] = max(values["top_k"], 0)  # -1 is off too
    if not _token_ids(values["stop_token_ids"]):
        raise BadRequest("stop_token_ids must be a list of token ids", "stop_token_ids")
    if len(values["stop_token_ids"]) > MAX_STOP_TOKENS:
        raise BadRequest(f"stop_token_ids must be at most {MAX_STOP_TOKENS}", "stop_token_ids")
    values["stop_token_ids"] = tuple(values["stop_token_ids"])
    try:
        return Sampling(
            n=1 if body.get("n") is None else body["n"], max_tokens=limit, top_logprobs=top_logprobs, **values
        )
    except (ValueError, OverflowError) as error:
        raise BadRequest(str(error)) from None


def _logprobs(body: dict[str, Json], chat: bool) -> int | None:
    """Return the number of top logprobs per token; None: no log-probabilities at all."""
    # Chat has a switch and a number, completions have the number alone.
    name = "top_logprobs" if chat else "logprobs"
    top = body.get(name)
    if chat and body.get("logprobs") not in (None, True, False):
        raise BadRequest(f"logprobs must be true or false, got {shorten(body['logprobs'])}", "logprobs")
    requested = body.get("logprobs") if chat else top is not None and top is not False
    if chat and top and not requested:
        raise BadRequest("top_logprobs needs logprobs: true", name)
    if not requested:
        return None
    # Without a number, the log-probability is of the sampled token alone.
    top = 0 if top is None else top
    if type(top) is not int or not 0 <= top <= TOP_LOGPROBS:
        raise BadRequest(f"{name} must be 0 to {TOP_LOGPROBS}, got {shorten(top)}", name)
    if body.get("echo"):
        raise BadRequest("echo with logprobs is not supported: prompts are not scored", "echo")
    return top


def _prompts(prompt: Json, tokenizer: Tokenizer, samples: int) -> list[list[int]]:
    """Read the prompts: one text, several texts, one list of token ids, or several."""
    prompts = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    _check_count(len(prompts), samples)
    token_ids = []
    for text in prompts:
        if isinstance(text, str | list):
            _check_length(len(text), "prompt")
        ids = tokenizer(whole(text))["input_ids"] if isinstance(text, str) else text
        if not ids or not _token_ids(ids):
            raise BadRequest("prompt must be a text or a list of token ids, or a list of these; none empty", "prompt")
        token_ids.append(ids)
    return token_ids


def _check_length(size: int, param: str) -> None:
    if size > MAX_TEXT:
        raise BadRequest(f"a prompt may have at most {MAX_TEXT} characters or token ids, got {size}", param)


def _token_ids(ids: Json) -> bool:
    return isinstance(ids, list | tuple) and all(type(token) is int for token in ids)


@lru_cache(8)
def _ends_of_turns(tokenizer: Tokenizer, template: str) -> tuple[int, ...]:
    """Return the tokens that end a turn in the tokenizer's template, which is part of the cache's key."""
    try:
        return ChatFormat(tokenizer).stop_ids
    except ValueError:
        return ()


def _messages(body: dict[str, Json], tokenizer: Tokenizer) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
        raise BadRequest("messages must be a list of at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise BadRequest(f"messages must be at most {MAX_MESSAGES}, got {len(messages)}", "messages")
    if not tokenizer.chat_template:
        raise BadRequest("this model has no chat template: use /v1/completions", "messages")
    # Variables of the template, which must not override the arguments of `apply_chat_template` below.
    variables = body.get("chat_template_kwargs") or {}
    arguments = signature(tokenizer.apply_chat_template).parameters
    if not isinstance(variables, dict) or variables.keys() & arguments.keys():
        raise BadRequest("chat_template_kwargs are variables of the model's own template", "chat_template_kwargs")
    # A special token in a message is text: it must not end the turn.
    special = SpecialTokens(tokenizer)
    plain = []
    size = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
                raise BadRequest("only text can be in a message's content", "messages")
            content = "".join(str(part.get("text", "")) for part in content)
        size += len(content) if isinstance(content, str) else 0
        _check_length(size, "messages")
        plain.append(special.inert_values({**message, "content": content}))
    try:
        return tokenizer.apply_chat_template(
            plain, add_generation_prompt=True, tokenize=True, return_dict=False, **variables
        )
    except Exception as error:  # templates are programs and raise anything
        raise BadRequest(f"the chat template cannot render these messages: {error}", "messages") from None
