"""A language model as a judge, behind any OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from string import Formatter
from time import time
from typing import Any, Literal

from .threads import within
from .verifier import Scores, Unscored, collect

try:
    import aiohttp
except ImportError as error:
    raise ImportError("LM judges need aiohttp: pip install 'torchforge[serve]'") from error

TEMPLATE = (
    "Problem:\n{prompt}\n\nProposed answer:\n{response}\n\n"
    "Is the proposed answer correct? Answer with yes or no, and nothing else."
)
AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 20.0  # seconds
MILLION = 1_000_000


class _Retry(Exception):
    """A failure that may pass. after: seconds that the endpoint asks to wait."""

    def __init__(self, message: str, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after


@dataclass
class Cost:
    """What a judge has used. `money` is in the currency of the prices; `untold` answers did not say what they used."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    untold: int = 0
    money: float = 0.0


class LMJudge:
    """The share of yes among k votes, or P(yes) / (P(yes) + P(no)) of the one token that it would answer; in [0, 1].

    Failures that may pass (no connection, no answer in time, 429, 5xx, an answer that is no JSON) are tried again with
    growing pauses, or after what `Retry-After` says. What stays a failure is no score, and neither is a verdict that
    cannot be read: votes count where they can, and more than half of them must.

    Responses are judged in the order they come, at most `concurrency` at a time. Waiting for a turn costs nothing of
    `time_limit`, nor of the timeout of a `Panel` as long as the endpoint answers some requests in it.

    Args:
        url: up to and with the version, such as http://127.0.0.1:8000/v1.
        model: what the endpoint calls it.
        name: of the column; default the model.
        template: text with {response}, {prompt} and {target} as wanted. A response without a target has no score where
            the template asks for it.
        system_prompt: of a chat.
        endpoint: "chat" or "completions".
        scoring: "votes", or "logprob" from the likeliest tokens, of which one that is not among them counts as 0.
        votes: answers to each question, sampled at `temperature`.
        yes, no: words of the verdict, whatever their case, spaces aside. The last of them that stands alone in an
            answer counts; as log-probabilities, those tokens that are one of them.
        max_tokens: of an answer that is a vote.
        top: how many likeliest tokens are asked for.
        concurrency: most responses at a time, and so most requests. A response keeps its turn while it pauses.
        retries: how often a request is tried again.
        request_timeout: seconds for one request.
        time_limit: seconds for one response from its turn on, with its tries and pauses.
        api_key: sent as a bearer token.
        prices: for a million tokens of questions, and of answers.
        budget: once `cost.money` has reached it nothing is asked any more; requests under way by then still count.

    Raises:
        ValueError: a setting that cannot be; says which. ImportError: aiohttp is not installed.
    """

    def __init__(
        self,
        url: str,
        model: str,
        name: str | None = None,
        *,
        template: str = TEMPLATE,
        system_prompt: str | None = None,
        endpoint: Literal["chat", "completions"] = "chat",
        scoring: Literal["votes", "logprob"] = "votes",
        votes: int = 1,
        temperature: float = 1.0,
        yes: str = "yes",
        no: str = "no",
        max_tokens: int = 16,
        top: int = 5,
        concurrency: int = 8,
        retries: int = 4,
        request_timeout: float = 30.0,
        time_limit: float = 50.0,
        api_key: str | None = None,
        prices: tuple[float, float] = (0.0, 0.0),
        budget: float | None = None,
    ) -> None:
        yes, no = yes.strip(), no.strip()
        fields = {field for _, field, _, _ in Formatter().parse(template) if field is not None}
        for bad, message in (
            (not url.startswith(("http://", "https://")), f"url must begin with http:// or https://, got {url!r}"),
            ("response" not in fields, f"template must hold {{response}}: {template[:60]!r}"),
            (fields - {"prompt", "response", "target"}, "template knows {prompt}, {response} and {target} only"),
            (endpoint not in ("chat", "completions"), f"endpoint must be chat or completions, got {endpoint!r}"),
            (scoring not in ("votes", "logprob"), f"scoring must be votes or logprob, got {scoring!r}"),
            (min(votes, max_tokens, top, concurrency) < 1, "votes, max_tokens, top and concurrency must be at least 1"),
            (retries < 0 or temperature < 0, "retries and temperature must be at least 0"),
            (scoring == "logprob" and votes > 1, "scoring logprob asks once: leave votes at 1"),
            (votes > 1 and temperature == 0, "votes at temperature 0 are all the same: raise it, or set votes to 1"),
            (min(request_timeout, time_limit) <= 0, "request_timeout and time_limit must be above 0 seconds"),
            (not yes or not no or yes.lower() == no.lower(), "yes and no must be two different words"),
            (system_prompt is not None and endpoint != "chat", "system_prompt needs endpoint chat"),
            (budget is not None and not any(prices), "a budget needs prices"),
        ):
            if bad:
                raise ValueError(message)
        self.names: tuple[str, ...] = (name or model,)
        self.cost = Cost()
        self.progress = 0  # requests that were answered: a dead endpoint makes none, and a panel then waits no longer
        self._url = f"{url.rstrip('/')}/{'chat/completions' if endpoint == 'chat' else 'completions'}"
        self._fixed: dict[str, Any] = {"model": model, "temperature": temperature}
        if scoring == "votes":
            self._fixed["max_tokens"] = max_tokens
        else:
            self._fixed["max_tokens"] = 1
            self._fixed |= {"logprobs": True, "top_logprobs": top} if endpoint == "chat" else {"logprobs": top}
        self._template, self._fields, self._system, self._chat = template, fields, system_prompt, endpoint == "chat"
        self._by_votes, self._votes, self._yes, self._no = scoring == "votes", votes, yes.lower(), no.lower()
        self._verdict = re.compile(rf"(?<!\w)({re.escape(yes)}|{re.escape(no)})(?!\w)", re.IGNORECASE)
        self._concurrency, self._retries, self._time_limit = concurrency, retries, time_limit
        self._timeout = aiohttp.ClientTimeout(total=request_timeout)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._prices, self._budget = prices, budget
        self._at: tuple[asyncio.AbstractEventLoop, aiohttp.ClientSession, asyncio.Semaphore] | None = None

    @property
    def fingerprint(self) -> str:
        """Of the question and how it is asked; it cannot tell that the endpoint changes what it calls by a name."""
        asked = (self._url, self._fixed, self._system, self._template, self._votes, self._yes, self._no)
        return f"judge {asked!r}"

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """One number for each response."""
        session, turns = self._connected()

        async def in_turn(response: str) -> float:
            async with turns:
                judged = self._judge(session, prompt, response, target)
                return await within(self._time_limit, judged, f"the judge {self.names[0]}")

        return await collect([in_turn(response) for response in responses], 1)

    async def close(self) -> None:
        """Closes its connections; requests that are under way fail."""
        if self._at is not None:
            await self._at[1].close()
            self._at = None

    async def _judge(self, session: aiohttp.ClientSession, prompt: str, response: str, target: str | None) -> float:
        if "target" in self._fields and target is None:
            raise Unscored("the template asks for a target, and there is none")
        text = self._template.format(prompt=prompt, response=response, target=target)
        system = [{"role": "system", "content": self._system}] if self._system is not None else []
        question = {"messages": [*system, {"role": "user", "content": text}]} if self._chat else {"prompt": text}
        if not self._by_votes:
            return self._likelihood((await self._ask(session, {**self._fixed, **question}))[0])
        verdicts: list[bool | None] = []
        while (left := self._votes - len(verdicts)) > 0:
            # Not every endpoint heeds n: what is lacking is asked for again.
            several = {"n": left} if left > 1 else {}
            choices = await self._ask(session, {**self._fixed, **question, **several})
            verdicts += [self._read(choice) for choice in choices[:left]]
        found = [verdict for verdict in verdicts if verdict is not None]
        if 2 * len(found) <= len(verdicts):
            said = self._text(choices[-1])
            raise Unscored(
                f"{len(found)} of {len(verdicts)} verdicts could be read; the last answer was {said[-80:]!r}"
            )
        return sum(found) / len(found)

    def _text(self, choice: dict[str, Any]) -> str:
        return (choice["message"].get("content") if self._chat else choice["text"]) or ""

    def _read(self, choice: dict[str, Any]) -> bool | None:
        words = self._verdict.findall(self._text(choice))
        return words[-1].lower() == self._yes if words else None

    def _likelihood(self, choice: dict[str, Any]) -> float:
        try:
            if self._chat:
                likely = [(one["token"], one["logprob"]) for one in choice["logprobs"]["content"][0]["top_logprobs"]]
            else:
                likely = list(choice["logprobs"]["top_logprobs"][0].items())
        except (KeyError, IndexError, TypeError):
            raise Unscored("the endpoint tells no log-probabilities: take scoring votes") from None
        yes, no = (
            sum(math.exp(logprob) for token, logprob in likely if token.strip().lower() == word)
            for word in (self._yes, self._no)
        )
        if not yes + no:
            raise Unscored(f"neither {self._yes} nor {self._no} is among the likeliest tokens {[t for t, _ in likely]}")
        return yes / (yes + no)

    async def _ask(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The choices of an answer. Unscored: it stays a failure."""
        attempt = 0
        while True:
            try:
                self._check_budget()
                return await self._request(session, body)
            except _Retry as failure:
                if attempt == self._retries:
                    raise Unscored(f"{failure}, tried {attempt + 1} times") from None
                attempt += 1
                pause = min(FIRST_PAUSE * 2 ** (attempt - 1), LONGEST_PAUSE) * random.uniform(0.5, 1.0)
                if failure.after is not None:
                    pause = failure.after
                if pause > self._time_limit:
                    raise Unscored(f"{failure}, and asks to wait {pause:g} s") from None
            await asyncio.sleep(pause)

    def _check_budget(self) -> None:
        if self._budget is not None and self.cost.money >= self._budget:
            raise Unscored(f"the budget of {self._budget:g} is spent")
        if self._budget is not None and self.cost.untold:
            raise Unscored("the endpoint does not say what it uses: a budget cannot be kept")

    async def _request(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> list[dict[str, Any]]:
        self.cost.requests += 1
        try:
            async with session.post(self._url, json=body, headers=self._headers) as answer:
                text = await answer.text(errors="replace")
                status, after = answer.status, _seconds(answer.headers.get("Retry-After"))
        except TimeoutError:
            raise _Retry(f"{self._url} gave no answer within {self._timeout.total:g} s") from None
        except aiohttp.ClientError as error:
            raise _Retry(f"{self._url} could not be asked ({type(error).__name__}: {error})") from None
        if status in AGAIN:
            raise _Retry(f"{self._url} answered {status}: {text[:120]!r}", after)
        if status != 200:
            raise Unscored(f"{self._url} answered {status}: {text[:200]!r}")
        try:
            found = _parsed(text, self._chat)
        except (ValueError, LookupError, TypeError, AttributeError):
            raise _Retry(f"{self._url} gave what is no answer: {text[:120]!r}") from None
        self.progress += 1
        self._count(found.get("usage"))
        return found["choices"]

    def _count(self, usage: Any) -> None:
        try:
            asked, answered = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        except (KeyError, TypeError, ValueError):
            self.cost.untold += 1
            return
        self.cost.prompt_tokens += asked
        self.cost.completion_tokens += answered
        self.cost.money += (asked * self._prices[0] + answered * self._prices[1]) / MILLION

    def _connected(self) -> tuple[aiohttp.ClientSession, asyncio.Semaphore]:
        """Of the loop that runs: neither serves another."""
        loop = asyncio.get_running_loop()
        if self._at is None or self._at[0] is not loop or self._at[1].closed:
            self._at = (loop, aiohttp.ClientSession(timeout=self._timeout), asyncio.Semaphore(self._concurrency))
        return self._at[1:]


def _parsed(text: str, chat: bool) -> dict[str, Any]:
    """ValueError, LookupError, TypeError, AttributeError: no answer of this interface."""
    found = json.loads(text)
    for choice in found["choices"]:
        said = choice["message"].get("content") if chat else choice["text"]
        if not isinstance(said, str | None):
            raise TypeError("the answer is no text")
    if not found["choices"]:
        raise ValueError("no choice")
    return found


def _seconds(retry_after: str | None) -> float | None:
    """Of a Retry-After header: seconds, or a date."""
    if retry_after is None:
        return None
    if re.fullmatch(r"\d+(\.\d+)?", retry_after.strip()):
        return float(retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time())
    except ValueError:
        return None
