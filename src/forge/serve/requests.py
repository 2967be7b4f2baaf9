"""Validation of OpenAI requests: a setting that this server would ignore is an error."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import signature
from typing import Any

from ..config.plugin import nearest
from ..data.chat import ChatFormat
from ..data.special_tokens import SpecialTokens, whole
from ..models.template_limits import limit_templates
from ..types import TOP_LOGPROBS, Sampling

SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": (), "seed": None}
COMMON = {"model", "n", "stop", "stream", "stream_options", "max_tokens", "logprobs", "priority", *SAMPLING}
# Fields without effect on the tokens, or with an effect that is always on.
HARMLESS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "return_token_ids"}
# Unsupported fields, with the values that are accepted because they change nothing.
ABSENT: dict[str, tuple[Any, ...]] = {
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
NUMBERS: dict[str, Any] = {
    **dict.fromkeys(("n", "max_tokens", "max_completion_tokens", "best_of", "top_k", "top_logprobs"), int),
    **dict.fromkeys(("seed", "priority"), int),
    **dict.fromkeys(("temperature", "top_p"), (int, float)),
}
MOST = 4096  # samples in one request
MOST_STOPS, LONGEST_STOP = 16, 256  # stop strings, and characters of one
MOST_STOP_TOKENS = 1024
MOST_MESSAGES = 4096
LONGEST_TEXT = 1 << 20  # characters of a prompt or of a chat, and token ids of a prompt
REPEATED = 1 << 22  # tokens of the prompts in an answer, which has them once for each sample
SHOWN = 60  # characters of a value in an error
COMPLETIONS = {"prompt", "echo", "best_of"}
CHAT = {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"}


class BadRequest(ValueError):
    """An invalid request; `param` is the field at fault."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


@dataclass(frozen=True, slots=True)
class Job:
    """A parsed request: `n` samples of each prompt.

    stop: strings; the text ends before the first of them. usage: a stream ends with a chunk of token counts.
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


def parse(body: Any, tokenizer: Any, model: str, *, chat: bool) -> Job:
    """The body of a request to `/v1/completions` or, with `chat`, `/v1/chat/completions`.

    Raises:
        BadRequest: names the field and the remedy.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    known = COMMON | (CHAT if chat else COMPLETIONS)
    for name, value in body.items():
        if name in ABSENT and value not in ABSENT[name]:
            raise BadRequest(f"{name} = {shown(value)} is not supported", name)
        if name not in known | HARMLESS | ABSENT.keys():
            hint = nearest(name[:SHOWN], sorted(known))
            raise BadRequest(f"unknown field {shown(name)}{hint}", name[:SHOWN])
        if value is not None and name in NUMBERS:
            _check_number(name, value)
        if name in ("echo", "stream") and value not in (None, True, False):
            raise BadRequest(f"{name} must be true or false, got {shown(value)}", name)
    if body.get("model") not in (None, model):
        raise BadRequest(f"model {shown(body['model'])} is not served here: ask for {model!r}", "model", 404)
    if body.get("best_of") not in (None, body.get("n") or 1):
        raise BadRequest("best_of other than n is not supported: ask for n samples and choose", "best_of")
    stop = _stop(body.get("stop"))
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or options.keys() - {"include_usage"}:
        raise BadRequest("stream_options supports only include_usage", "stream_options")
    samples = max(1, body.get("n") or 1)
    prompts = [_messages(body, tokenizer)] if chat else _prompts(body.get("prompt"), tokenizer, samples)
    top = _logprobs(body, chat)
    sampling = _sampling(body, chat, top or 0)
    if chat:  # a model's own eos is often not what ends a turn
        stops = (*sampling.stop_token_ids, *_ends_of_turns(tokenizer, str(tokenizer.chat_template)))
        sampling = replace(sampling, stop_token_ids=tuple(dict.fromkeys(stops)))
    _check_count(len(prompts), sampling.n)
    if (size := sum(map(len, prompts)) * sampling.n) > REPEATED:
        raise BadRequest(
            f"the answer would repeat {size} tokens of prompts, more than {REPEATED}: ask for fewer samples at once",
            "n",
        )
    return Job(
        prompts,
        sampling,
        stop,
        top is not None,
        chat,
        echo=bool(body.get("echo")),
        stream=bool(body.get("stream")),
        usage=bool(options.get("include_usage")),
        priority=body.get("priority") or 0,
    )


def _check_count(prompts: int, samples: int) -> None:
    if prompts * samples > MOST:
        raise BadRequest(f"{prompts} prompts of {samples} samples are more than {MOST} in one request", "n")


def _check_number(name: str, value: Any) -> None:
    """BadRequest: the value of a field is no number, or one that no machine word holds."""
    if isinstance(value, bool) or not isinstance(value, NUMBERS[name]):
        raise BadRequest(f"{name} must be a number{' without a fraction' * (NUMBERS[name] is int)}", name)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise BadRequest(f"{name} must be a number of at most 64 bits", name)


def _stop(stop: Any) -> list[str]:
    stop = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stop, list) or not all(isinstance(item, str) and item for item in stop):
        raise BadRequest("stop must be a string or a list of strings that are not empty", "stop")
    if len(stop) > MOST_STOPS:
        raise BadRequest(f"stop must be at most {MOST_STOPS} strings, got {len(stop)}", "stop")
    if (longest := max(map(len, stop), default=0)) > LONGEST_STOP:
        raise BadRequest(f"stop strings must have at most {LONGEST_STOP} characters, got {longest}", "stop")
    return stop


def shown(value: Any) -> str:
    """A value of a request in an error: at most its first characters."""
    text = repr(value[:SHOWN] if isinstance(value, str | list) else value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _sampling(body: dict[str, Any], chat: bool, top: int) -> Sampling:
    """With OpenAI's defaults, not the generator's: clients expect those."""
    # OpenAI's limits: 16 tokens of a completion, of a chat as many as the model has room for.
    asked = [body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    limit = asked[0] if asked else (1 << 20 if chat else 16)
    given = {name: default if body.get(name) is None else body[name] for name, default in SAMPLING.items()}
    given["top_k"] = max(given["top_k"], 0)  # -1 is off too
    if not _token_ids(given["stop_token_ids"]):
        raise BadRequest("stop_token_ids must be a list of token ids", "stop_token_ids")
    if len(given["stop_token_ids"]) > MOST_STOP_TOKENS:
        raise BadRequest(f"stop_token_ids must be at most {MOST_STOP_TOKENS}", "stop_token_ids")
    given["stop_token_ids"] = tuple(given["stop_token_ids"])
    try:
        return Sampling(n=1 if body.get("n") is None else body["n"], max_tokens=limit, top_logprobs=top, **given)
    except (ValueError, OverflowError) as error:
        raise BadRequest(str(error)) from None


def _logprobs(body: dict[str, Any], chat: bool) -> int | None:
    """Number of top logprobs to return per token; None: no log-probabilities at all."""
    name = "top_logprobs" if chat else "logprobs"
    top = body.get(name)
    if chat and body.get("logprobs") not in (None, True, False):
        raise BadRequest(f"logprobs must be true or false, got {shown(body['logprobs'])}", "logprobs")
    wanted = body.get("logprobs") if chat else top is not None and top is not False
    if chat and top and not wanted:
        raise BadRequest("top_logprobs needs logprobs: true", name)
    if not wanted:
        return None
    top = 0 if top is None else top
    if type(top) is not int or not 0 <= top <= TOP_LOGPROBS:
        raise BadRequest(f"{name} must be 0 to {TOP_LOGPROBS}, got {shown(top)}", name)
    if body.get("echo"):
        raise BadRequest("echo with logprobs is not supported: prompts are not scored", "echo")
    return top


def _prompts(prompt: Any, tokenizer: Any, samples: int) -> list[list[int]]:
    """One text, several, one list of token ids, or several: so many samples of each are asked for."""
    many = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    _check_count(len(many), samples)
    found = []
    for one in many:
        if isinstance(one, str | list):
            _check_length(len(one), "prompt")
        ids = tokenizer(whole(one))["input_ids"] if isinstance(one, str) else one
        if not ids or not _token_ids(ids):
            raise BadRequest("prompt must be a text or a list of token ids, or a list of these; none empty", "prompt")
        found.append(ids)
    return found


def _check_length(size: int, param: str) -> None:
    if size > LONGEST_TEXT:
        raise BadRequest(f"a prompt may have at most {LONGEST_TEXT} characters or token ids, got {size}", param)


def _token_ids(ids: Any) -> bool:
    return isinstance(ids, list | tuple) and all(type(token) is int for token in ids)


@lru_cache(8)
def _ends_of_turns(tokenizer: Any, template: str) -> tuple[int, ...]:
    """The tokens that end a turn in the tokenizer's template, by which they are cached; none if it renders no turn."""
    try:
        return ChatFormat(tokenizer).stop_ids
    except ValueError:
        return ()


def _messages(body: dict[str, Any], tokenizer: Any) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
        raise BadRequest("messages must be a list of at least one message", "messages")
    if len(messages) > MOST_MESSAGES:
        raise BadRequest(f"messages must be at most {MOST_MESSAGES}, got {len(messages)}", "messages")
    if not tokenizer.chat_template:
        raise BadRequest("this model has no chat template: use /v1/completions", "messages")
    variables, taken = body.get("chat_template_kwargs") or {}, signature(tokenizer.apply_chat_template).parameters
    if not isinstance(variables, dict) or variables.keys() & taken.keys():
        raise BadRequest("chat_template_kwargs are variables of the model's own template", "chat_template_kwargs")
    limit_templates()
    special, plain, size = SpecialTokens(tokenizer), [], 0
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
