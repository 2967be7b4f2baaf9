"""OpenAI's Completions API: the model continues a text or token ids as they are, without a chat template."""

import time
from collections.abc import Mapping, Sequence

from openai.types import CompletionUsage

from ..messages import MAX_SAMPLES, BadRequest, Delta, ModelRequest, ModelTurn
from . import fields
from .chat import ChatDialect, ChatEvents, usage_of
from .fields import Json

SAMPLING = ("temperature", "top_p", "top_k", "seed")
KNOWN = {*SAMPLING, "model", "prompt", "n", "max_tokens", "stop", "stream", "stream_options", "logprobs"}
NEUTRAL: Mapping[str, Sequence[Json]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "suffix": ("",),
}
MAX_TOKENS = 16  # OpenAI's default


class CompletionEvents(ChatEvents):
    """Writer of the samples of one completions request as chunks, which all have the first sample's id."""

    def begin(self, prompt_tokens: int) -> bytes:
        """Return b"": a stream of completions starts with the first text."""
        return b""

    def delta(self, delta: Delta) -> bytes:
        """Return a chunk with a piece of a sample's text; b"" if the piece has no content."""
        if not delta.content:
            return b""
        return self._write_chunk([_make_choice(delta.sample, delta.content, None, self._request)])

    def _last_choice(self, index: int, turn: ModelTurn) -> Json:
        return _make_choice(index, "", turn, self._request)

    def _write_chunk(self, choices: list[Json], usage: CompletionUsage | None = None) -> bytes:  # type: ignore[override]
        return fields.server_sent(_make_completion(self._ids[0], self._request, choices, usage))


class CompletionsDialect(ChatDialect):
    """Requests to `/v1/completions`, each with one prompt."""

    writer = CompletionEvents
    id_prefix = "cmpl-"

    def read(self, body: Json) -> ModelRequest:
        """Parse the JSON body of a request; a BadRequest names the field that is invalid or unsupported."""
        fields.check_fields(body, KNOWN, ("user",), NEUTRAL)
        prompt = body.get("prompt")
        # Clients that send batches put a single prompt in a list.
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        is_tokens = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not prompt or not (is_tokens or isinstance(prompt, str)):
            raise BadRequest("prompt must be one text or one list of token ids, not empty", "prompt")
        options = fields.read_object(body.get("stream_options"), "stream_options")

        return ModelRequest(
            body["model"],
            # The tree of turns needs a message; "prompt" is a role that no chat message has.
            ({"role": "prompt", "content": str(prompt)},),
            prompt=prompt,
            samples=fields.read_integer(body, "n", 1, MAX_SAMPLES) or 1,
            max_tokens=fields.read_integer(body, "max_tokens") or MAX_TOKENS,
            stop=fields.stop_strings(body, "stop"),
            stream=fields.read_boolean(body, "stream"),
            stream_usage=fields.read_boolean(options, "include_usage"),
            logprobs=fields.read_integer(body, "logprobs", 0, fields.MAX_TOP_LOGPROBS),
            overridden=fields.overridden_settings(body, SAMPLING),
        )

    def complete(self, request: ModelRequest, turns: Sequence[ModelTurn]) -> Mapping[str, Json]:
        """Return the JSON body of an answer that is not streamed."""
        return _make_completion(
            turns[0].id,
            request,
            [_make_choice(index, turn.content, turn, request) for index, turn in enumerate(turns)],
            usage_of(turns),
        )


def _make_completion(
    completion_id: str, request: ModelRequest, choices: list[Json], usage: CompletionUsage | None
) -> dict[str, Json]:
    # A plain dictionary: the openai package's type has no field for token ids.
    return {
        "id": completion_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": choices,
        "usage": None if usage is None else usage.model_dump(exclude_unset=True),
    }


def _make_choice(index: int, text: str, turn: ModelTurn | None, request: ModelRequest) -> Json:
    """Return one entry of the field `choices`: a sample's number and text.

    Args:
        turn: the complete sample, whose finish reason, token ids and log-probabilities are added; None: the sample is
            still being generated.
    """
    choice: dict[str, Json] = {"index": index, "text": text, "finish_reason": None, "logprobs": None}
    if turn is not None:
        choice |= {"finish_reason": turn.finish, "token_ids": list(turn.token_ids)}
        if request.logprobs is not None:
            choice["logprobs"] = {
                "tokens": [token.text for token in turn.logprobs],
                "token_logprobs": [token.logprob for token in turn.logprobs],
                "top_logprobs": [dict(token.top) for token in turn.logprobs],
            }
    return choice
