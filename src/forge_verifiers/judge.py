"""A verifier that asks a language model, behind any OpenAI-compatible endpoint, and reads the verdict in its answer."""

import asyncio
import hashlib
import math
import os
import re
from collections.abc import Sequence
from importlib import import_module
from string import Formatter
from typing import Any

from forge.data.special_tokens import inert_anywhere
from forge.data.thoughts import without_thoughts
from forge.rewards.verifier import Scores, Unscored, collect_scores
from forge.types import Conversation
from forge_http.bounded_http import bounded_transport
from forge_verifiers.threads import await_within

from .config import JudgeSettings

try:
    from openai import APIConnectionError, APIStatusError, APITimeoutError, AsyncOpenAI, DefaultAsyncHttpxClient
except ImportError as error:
    raise ImportError("LM judges need the openai package: pip install openai") from error

Json = dict[str, Any]

# For the library that the openai package uses: httpx, or httpx2 in later versions.
_TRANSPORT = bounded_transport(import_module(DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0]))


class LMJudge:
    """A verifier that asks a language model whether a response is right, and scores it from 0 to 1.

    With `scoring="votes"` the score is the share of yes among the votes whose verdict can be read; with "logprob",
    P(yes) / (P(yes) + P(no)) of the next token.

    The `openai` client retries transient errors (connection, timeout, 408, 409, 429, 5xx) with backoff or
    `Retry-After`; a malformed answer is retried at once. If all retries fail, the response is unscored. So it is if
    half or more of its votes cannot be read.

    Responses are judged in order, at most `concurrency` at a time. Waiting for earlier ones does not count for
    `time_limit`, nor for a `Panel`'s timeout as long as the endpoint answers other requests.

    Args:
        url, model, name, settings: fields of `forge_verifiers.config.JudgeSettings`.
        api_key: the key that is sent as a bearer token; None: the one in the variable `api_key_env`.

    Attributes:
        progress: the number of answered requests.

    Raises:
        ValueError: a setting is invalid.
        ImportError: openai is not installed.
    """

    def __init__(
        self, url: str, model: str, name: str | None = None, *, api_key: str | None = None, **settings: Any
    ) -> None:
        self._settings = section = JudgeSettings(url=url, model=model, name=name, **settings)
        self.names: tuple[str, ...] = (name or model,)
        self.progress = 0
        self._base = url.rstrip("/")
        logprobs = {"max_tokens": 1, "logprobs": True, "top_logprobs": section.top}
        self._fixed: Json = {
            **{"model": model, "temperature": section.temperature},
            **({"max_tokens": section.max_tokens} if section.scoring == "votes" else logprobs),
        }
        self._yes, self._no = section.yes.strip().lower(), section.no.strip().lower()
        # Not empty: without a key the client would send the one in OPENAI_API_KEY, to any endpoint.
        self._api_key = api_key or os.environ.get(section.api_key_env or "") or "none"
        self._connection: tuple[asyncio.AbstractEventLoop, AsyncOpenAI, asyncio.Semaphore] | None = None

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """Return scores [responses, 1] of the responses to one prompt; NaN with a reason where one is unscored."""
        # Neither the client nor the semaphore of an event loop can be used in another one.
        loop = asyncio.get_running_loop()
        if self._connection is None or self._connection[0] is not loop or self._connection[1].is_closed():
            # Redirects could lead the prompt and the key to another server.
            connected = AsyncOpenAI(
                api_key=self._api_key,
                base_url=self._base,
                max_retries=self._settings.retries,
                timeout=self._settings.request_timeout,
                http_client=DefaultAsyncHttpxClient(transport=_TRANSPORT(), follow_redirects=False),
            )
            self._connection = (loop, connected, asyncio.Semaphore(self._settings.concurrency))
        _, client, slots = self._connection

        async def score_response(response: str) -> float:
            async with slots:
                return await await_within(
                    self._settings.time_limit,
                    self._judge_response(client, prompt, response, target),
                    f"the judge {self.names[0]}",
                )

        return await collect_scores([score_response(response) for response in responses], 1)

    async def close(self) -> None:
        """Close the connections, so that pending requests fail."""
        if self._connection is not None:
            await self._connection[1].close()
            self._connection = None

    def question(self, prompt: str, response: str, target: str | None) -> str:
        """Return the question about one response; Unscored if the template needs a target and there is none."""
        if target is None and "target" in {field for _, field, _, _ in Formatter().parse(self._settings.template)}:
            raise Unscored("the judge's template needs a target, but the prompt has none")
        mark = mark_of(prompt, response)
        framed = f"----- {mark} -----\n{inert_anywhere(response)}\n----- end of {mark} -----"
        response_text = framed if self._settings.frame else response
        question = inert_anywhere(Conversation(prompt).plain)
        return self._settings.template.format(prompt=question, response=response_text, target=target, mark=mark)

    async def _judge_response(self, client: AsyncOpenAI, prompt: str, response: str, target: str | None) -> float:
        # Return the score of one response; Unscored if the model's answers give none.
        system = self._settings.system_prompt
        messages = [
            *([] if system is None else [{"role": "system", "content": system}]),
            {"role": "user", "content": self.question(prompt, response, target)},
        ]
        request: Json = {**self._fixed, "messages": messages}

        if self._settings.scoring == "logprob":
            choice = (await self._ask_model(client, request))[0]
            try:
                top_logprobs = choice["logprobs"]["content"][0]["top_logprobs"]
                top_tokens = [(top["token"], top["logprob"]) for top in top_logprobs]
            except (KeyError, IndexError, TypeError):
                raise Unscored("the judge's endpoint returns no log-probabilities: set scoring to votes") from None

            # Several tokens may spell a word, such as "yes" and " Yes".
            yes, no = (
                sum(math.exp(logprob) for token, logprob in top_tokens if token.strip().lower() == word)
                for word in (self._yes, self._no)
            )
            if not yes + no:
                raise Unscored(
                    f"neither {self._yes} nor {self._no} is among the top tokens {[token for token, _ in top_tokens]}"
                )
            return yes / (yes + no)

        if self._settings.votes > 1:
            request["n"] = self._settings.votes
        answers = [_text_of(choice) for choice in await self._ask_model(client, request)]
        verdicts_or_none = [read_verdict(answer, self._yes, self._no) for answer in answers]
        verdicts = [verdict for verdict in verdicts_or_none if verdict is not None]
        if 2 * len(verdicts) <= self._settings.votes:
            raise Unscored(
                f"{len(verdicts)} of {self._settings.votes} verdicts could be read; "
                f"the last answer was {answers[-1][-80:]!r}"
            )

        return sum(verdicts) / len(verdicts)

    async def _ask_model(self, client: AsyncOpenAI, body: Json) -> list[Json]:
        """Return the choices of the endpoint's answer to a request; Unscored if all attempts fail."""
        url = f"{self._base}/chat/completions"
        for _ in range(self._settings.retries + 1):
            try:
                # As plain JSON: endpoints deviate from the client's types, and the client does not check them.
                reply: Any = await client.post("/chat/completions", cast_to=object, body=body)
            except ValueError as error:
                reply = str(error)  # not JSON
            except APITimeoutError:
                raise Unscored(f"{url} did not respond within {self._settings.request_timeout:g} s") from None
            except APIConnectionError as error:
                cause = error.__cause__ or error
                raise Unscored(f"no connection to {url} ({type(cause).__name__}: {cause})") from None
            except APIStatusError as error:
                raise Unscored(f"{url} answered {error.status_code}: {error.response.text[:200]!r}") from None

            try:
                if not [_text_of(choice) for choice in reply["choices"]]:
                    continue
            except (ValueError, LookupError, TypeError, AttributeError):
                continue

            self.progress += 1
            return reply["choices"]

        raise Unscored(f"{url} gave an invalid answer: {str(reply)[:120]!r}, tried {self._settings.retries + 1} times")


def _text_of(choice: Json) -> str:
    # Return the text of a choice; an error if an endpoint gives another form.
    text = choice["message"].get("content")
    if not isinstance(text, str | None):
        raise TypeError("the judge's response is not text")
    return text or ""


def mark_of(prompt: str, response: str) -> str:
    """Return the mark of the lines around a response in the question for a judge.

    It is a digest of the response, so that the response cannot contain it: no text with its own digest can be found.
    Unlike with a random mark, the same response is always judged by the same question.
    """
    return hashlib.sha256(f"{len(prompt)} {prompt}{response}".encode("utf-8", "surrogatepass")).hexdigest()[:24]


# The start of a line that announces a verdict, such as "So my final verdict is" or "**Answer**:".
_ANNOUNCEMENT = (
    r"(?:(?:my|the|so|final|overall|therefore|thus|hence)[^\w\n]+)*"
    r"(?:verdict|answer|judge?ment|decision|conclusion|result|grade|rating|label|correct)"
    r"[^\w\n]*?(?:is\b|[:=–—-])"
)


def read_verdict(answer: str, yes: str, no: str) -> bool | None:
    r"""Return whether the verdict in a judge's answer is `yes`; None if there is no clear verdict.

    The words count in upper and lower case, and after the judge's thoughts. The verdict is the last word that is the
    only one on its line, or is marked as the verdict: "Verdict: yes" at the beginning of a line, `[[yes]]`,
    `\boxed{yes}`, `<verdict>yes</verdict>`, a value in JSON, in which true is yes. Without such a word it is the first
    word of the first or the last line, if punctuation follows it ("No, it is wrong"). Elsewhere the words do not count,
    as in "there is no error".

    >>> read_verdict("Verdict: yes", "yes", "no")
    True
    """
    answer = without_thoughts(answer)
    either = f"{re.escape(yes)}|{re.escape(no)}"
    # A boolean in JSON is one of the words: {"verdict": true}.
    truths = {"true": yes, "false": no}
    boolean = re.compile(r"(\"[\w ]{1,40}\"\s*:\s*)\"?(true|false)\b\"?", re.IGNORECASE)
    answer = boolean.sub(lambda pair: pair[1] + truths[pair[2].lower()], answer)
    # One of the words by itself, not as a part of another word or of a number.
    word = rf"(?<![\w.-])({either})(?![\w-]|\.\d)"
    forms = (
        # The word only, or after an announcement, to the end of the line.
        rf"^[^\w?\n]*(?:{_ANNOUNCEMENT}[^\w?\n]*)?{word}[^\w?\n]*$",
        # After an announcement, with more text after punctuation in which neither word occurs.
        rf"^[^\w\n]*{_ANNOUNCEMENT}[^\w?\n]*{word}[.,;:!](?!.*(?<!\w)(?:{either})(?!\w))",
        # A value in JSON: "verdict": "yes".
        rf"\"[\w ]{{1,40}}\"[^\S\n]*:[^\S\n]*\"?{word}\"?[^\S\n]*(?:[,}}]|$)",
        # [[yes]], \boxed{yes} or \boxed{\text{yes}}, <verdict>yes</verdict>.
        rf"\[\[\s*{word}\s*\]\]",
        rf"\\boxed\{{(?:\\text\w*\{{)?\s*{word}\s*\}}",
        rf"<\w+>\s*{word}\s*</\w+>",
    )
    # Each form has its own group for the word.
    matches = re.finditer("|".join(forms), answer, re.IGNORECASE | re.MULTILINE)
    verdicts = [next(filter(None, match.groups())) for match in matches]

    # Otherwise the first words of the first and the last line count, if they do not contradict each other.
    if not verdicts:
        lines = answer.strip().splitlines()
        # Not as in "No. of the cases".
        leading = re.compile(rf"[^\w?]*{word}(?:[.,;:!—](?=\s|$)(?!\sof\b)|\s[–—-]\s)", re.IGNORECASE)
        leading_matches = (leading.match(line) for line in lines[:1] + lines[-1:])
        verdicts = [match[1] for match in leading_matches if match]
        if len({verdict.lower() for verdict in verdicts}) > 1:
            return None

    return verdicts[-1].lower() == yes.lower() if verdicts else None
