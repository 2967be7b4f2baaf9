"""A language model as a judge, behind any OpenAI-compatible endpoint, and the verdict in its answer."""

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
from forge_http.bounded_http import bounded_transport
from forge_verifiers.threads import await_within

from .config import JudgeSettings

try:
    from openai import APIConnectionError, APIStatusError, APITimeoutError, AsyncOpenAI, DefaultAsyncHttpxClient
except ImportError as error:
    raise ImportError("LM judges need the openai package: pip install openai") from error

Json = dict[str, Any]

# Of the library that openai uses: httpx, or httpx2 in later versions.
_TRANSPORT = bounded_transport(import_module(DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0]))


class LMJudge:
    """The share of yes among k votes, or P(yes) / (P(yes) + P(no)) of the next token; in [0, 1].

    The `openai` client retries transient errors (connection, timeout, 408, 409, 429, 5xx) with backoff or
    `Retry-After`; a malformed answer is retried at once. After the last retry the response is unscored. So is one of
    whose votes half or more are unreadable.

    Responses are judged in order, at most `concurrency` at a time. Waiting for a turn does not count for `time_limit`,
    nor for a `Panel`'s timeout as long as the endpoint answers other requests.

    Args:
        url, model, name, settings: fields of `forge_verifiers.config.JudgeSettings`.
        api_key: sent as a bearer token.

    Raises:
        ValueError: an invalid setting.
        ImportError: openai is not installed.
    """

    def __init__(
        self, url: str, model: str, name: str | None = None, *, api_key: str | None = None, **settings: Any
    ) -> None:
        self._settings = section = JudgeSettings(url=url, model=model, name=name, **settings)
        self.names: tuple[str, ...] = (name or model,)
        self.progress = 0  # answered requests: with a dead endpoint it stands still, and a panel times out
        self._base = url.rstrip("/")
        self._fixed: Json = {"model": model, "temperature": section.temperature}
        if section.scoring == "votes":
            self._fixed["max_tokens"] = section.max_tokens
        else:
            self._fixed |= {"max_tokens": 1, "logprobs": True, "top_logprobs": section.top}
        self._yes, self._no = section.yes.strip().lower(), section.no.strip().lower()
        # Without a key "none", or the client would send the one of OPENAI_API_KEY to any endpoint.
        self._api_key = api_key or os.environ.get(section.api_key_env or "") or "none"
        self._connection: tuple[asyncio.AbstractEventLoop, AsyncOpenAI, asyncio.Semaphore] | None = None

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """Return one number for each response."""
        client, turns = self._connect_client()

        async def in_turn(response: str) -> float:
            async with turns:
                judged = self._judge_response(client, prompt, response, target)
                return await await_within(self._settings.time_limit, judged, f"the judge {self.names[0]}")

        return await collect_scores([in_turn(response) for response in responses], 1)

    async def close(self) -> None:
        """Close the connections; requests in flight fail."""
        if self._connection is not None:
            await self._connection[1].close()
            self._connection = None

    def question(self, prompt: str, response: str, target: str | None) -> str:
        """Return the text that the judge gets. Unscored: the template needs a target, and there is none."""
        if target is None and "target" in {field for _, field, _, _ in Formatter().parse(self._settings.template)}:
            raise Unscored("the template asks for a target, and there is none")
        mark = mark_of(prompt, response)
        framed = f"----- {mark} -----\n{inert_anywhere(response)}\n----- end of {mark} -----"
        response_text = framed if self._settings.frame else response
        return self._settings.template.format(prompt=prompt, response=response_text, target=target, mark=mark)

    async def _judge_response(self, client: AsyncOpenAI, prompt: str, response: str, target: str | None) -> float:
        text = self.question(prompt, response, target)
        messages = [{"role": "user", "content": text}]
        if self._settings.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self._settings.system_prompt})
        question: Json = {**self._fixed, "messages": messages}

        # From the probabilities of the two words as the next token, in one request.
        if self._settings.scoring == "logprob":
            choice = (await self._ask_model(client, question))[0]
            try:
                tops = choice["logprobs"]["content"][0]["top_logprobs"]
                likely = [(top["token"], top["logprob"]) for top in tops]
            except (KeyError, IndexError, TypeError):
                raise Unscored("the endpoint gives no log-probabilities: set scoring to votes") from None

            yes, no = (
                sum(math.exp(logprob) for token, logprob in likely if token.strip().lower() == word)
                for word in (self._yes, self._no)
            )
            if not yes + no:
                raise Unscored(f"neither {self._yes} nor {self._no} is among the top tokens {[t for t, _ in likely]}")
            return yes / (yes + no)

        # Votes: as many answers as are set, of which more than half must be readable.
        several = {"n": self._settings.votes} if self._settings.votes > 1 else {}
        answers = [_text_of(choice) for choice in await self._ask_model(client, {**question, **several})]
        read = [read_verdict(answer, self._yes, self._no) for answer in answers]
        verdicts = [verdict for verdict in read if verdict is not None]
        if 2 * len(verdicts) <= self._settings.votes:
            count = f"{len(verdicts)} of {self._settings.votes} verdicts could be read"
            raise Unscored(f"{count}; the last answer was {answers[-1][-80:]!r}")

        return sum(verdicts) / len(verdicts)

    async def _ask_model(self, client: AsyncOpenAI, body: Json) -> list[Json]:
        """Return the choices of an answer. Unscored: all attempts failed."""
        url = f"{self._base}/chat/completions"
        for _ in range(self._settings.retries + 1):
            try:
                # As plain JSON: endpoints deviate from the client's types, and the client does not check them.
                reply: Any = await client.post("/chat/completions", cast_to=object, body=body)
            except ValueError as error:
                reply = str(error)  # not JSON
            except APITimeoutError:
                limit = self._settings.request_timeout
                raise Unscored(f"{url} gave no answer within {limit:g} s") from None
            except APIConnectionError as error:
                cause = error.__cause__ or error
                raise Unscored(f"no connection to {url} ({type(cause).__name__}: {cause})") from None
            except APIStatusError as error:
                text = error.response.text[:200]
                raise Unscored(f"{url} answered {error.status_code}: {text!r}") from None

            try:
                if not [_text_of(choice) for choice in reply["choices"]]:
                    continue
            except (ValueError, LookupError, TypeError, AttributeError):
                continue

            self.progress += 1
            return reply["choices"]

        tries = self._settings.retries + 1
        raise Unscored(f"{url} gave an invalid answer: {str(reply)[:120]!r}, tried {tries} times")

    def _connect_client(self) -> tuple[AsyncOpenAI, asyncio.Semaphore]:
        """Return the client and the semaphore of the running loop: neither works in another."""
        loop = asyncio.get_running_loop()
        if self._connection is None or self._connection[0] is not loop or self._connection[1].is_closed():
            # Redirects could lead the prompt and the key to another server.
            client = AsyncOpenAI(
                api_key=self._api_key,
                base_url=self._base,
                max_retries=self._settings.retries,
                timeout=self._settings.request_timeout,
                http_client=DefaultAsyncHttpxClient(transport=_TRANSPORT(), follow_redirects=False),
            )
            self._connection = (loop, client, asyncio.Semaphore(self._settings.concurrency))
        return self._connection[1:]


def _text_of(choice: Json) -> str:
    text = choice["message"].get("content")
    if not isinstance(text, str | None):
        raise TypeError("the answer is not text")
    return text or ""


def mark_of(prompt: str, response: str) -> str:
    """Return the mark of the lines around a response. A digest of it, which it cannot contain: no text can be found
    that holds its own. Unlike a random mark it leaves a judge's verdicts reproducible."""
    return hashlib.sha256(f"{len(prompt)} {prompt}{response}".encode("utf-8", "surrogatepass")).hexdigest()[:24]


_LEADS = r"(?:(?:my|the|so|final|overall|therefore|thus|hence)[^\w\n]+)*"
_MARKERS = r"(?:verdict|answer|judge?ment|decision|conclusion|result|grade|rating|label|correct)"


def read_verdict(answer: str, yes: str, no: str) -> bool | None:
    """Whether a judge says `yes`, in any case; None if it says neither, or one cannot tell.

    After its thoughts, the last verdict counts that is alone on a line or has a marker: "Verdict: yes" at the beginning
    of a line, `[[yes]]`, `\\boxed{yes}`, `<verdict>yes</verdict>`, a value in JSON. Without one, a word that starts the
    first or the last line, followed by a sign of punctuation ("No, it is wrong"). A word anywhere else does not count,
    as in "there is no error".

    >>> read_verdict("Verdict: yes", "yes", "no")
    True
    """
    answer = without_thoughts(answer)
    # The word by itself, not as a part of another or of a number.
    word = rf"(?<![\w.-])({re.escape(yes)}|{re.escape(no)})(?![\w-]|\.\d)"
    marked = re.compile(
        rf"^[^\w?\n]*(?:{_LEADS}{_MARKERS}[^\w\n]*?(?:is\b|[:=–—-])[^\w?\n]*)?{word}[^\w?\n]*$"
        rf"|^[^\w\n]*{_LEADS}{_MARKERS}[^\w\n]*?(?:is\b|[:=–—-])[^\w?\n]*{word}[.,;:!](?!.*(?<!\w)(?:{re.escape(yes)}|{re.escape(no)})(?!\w))"
        rf"|\"[\w ]{{1,40}}\"[^\S\n]*:[^\S\n]*\"?{word}\"?[^\S\n]*(?:[,}}]|$)"
        rf"|\[\[\s*{word}\s*\]\]|\\boxed\{{(?:\\text\w*\{{)?\s*{word}\s*\}}|<\w+>\s*{word}\s*</\w+>",
        re.IGNORECASE | re.MULTILINE,
    )

    # Each alternative has its group; the last verdict of a text counts.
    verdicts = [next(filter(None, match.groups())) for match in marked.finditer(answer)]

    # Without a marker only the first and the last line count, and only if they agree.
    if not verdicts:
        lines = answer.strip().splitlines()
        # A verdict as the first word, and not as in "No of the cases".
        leading = re.compile(rf"[^\w?]*{word}(?:[.,;:!—](?=\s|$)(?!\sof\b)|\s[–—-]\s)", re.IGNORECASE)
        begins = (leading.match(line) for line in lines[:1] + lines[-1:])
        verdicts = [match[1] for match in begins if match]
        if len({verdict.lower() for verdict in verdicts}) > 1:
            return None

    return verdicts[-1].lower() == yes.lower() if verdicts else None
