"""A language model as a judge, behind any OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from string import Formatter
from time import time
from typing import Any

from .spec import JudgeSettings
from .threads import within
from .verifier import Scores, Unscored, collect

try:
    import aiohttp
except ImportError as error:
    raise ImportError("LM judges need aiohttp: pip install 'torchforge[serve]'") from error

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
        url, model, name, settings: fields of `forge.verifiers.spec.JudgeSettings`.
        api_key: sent as a bearer token.

    Raises:
        ValueError: an invalid setting; says which. ImportError: aiohttp is not installed.
    """

    def __init__(
        self, url: str, model: str, name: str | None = None, *, api_key: str | None = None, **settings: Any
    ) -> None:
        how = JudgeSettings(url=url, model=model, name=name, **settings)
        api_key = api_key or os.environ.get(how.api_key_env or "")
        yes, no, chat = how.yes.strip(), how.no.strip(), how.endpoint == "chat"
        self.names: tuple[str, ...] = (name or model,)
        self.cost = Cost()
        self.progress = 0  # requests that were answered: a dead endpoint makes none, and a panel then waits no longer
        self._url = f"{url.rstrip('/')}/{'chat/completions' if chat else 'completions'}"
        self._fixed: dict[str, Any] = {"model": model, "temperature": how.temperature}
        if how.scoring == "votes":
            self._fixed["max_tokens"] = how.max_tokens
        else:
            self._fixed["max_tokens"] = 1
            self._fixed |= {"logprobs": True, "top_logprobs": how.top} if chat else {"logprobs": how.top}
        self._template, self._system, self._chat = how.template, how.system_prompt, chat
        self._fields = {field for _, field, _, _ in Formatter().parse(how.template)}
        self._by_votes, self._votes, self._yes, self._no = how.scoring == "votes", how.votes, yes.lower(), no.lower()
        self._verdict = re.compile(rf"(?<!\w)({re.escape(yes)}|{re.escape(no)})(?!\w)", re.IGNORECASE)
        self._concurrency, self._retries, self._time_limit = how.concurrency, how.retries, how.time_limit
        self._timeout = aiohttp.ClientTimeout(total=how.request_timeout)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._prices, self._budget = how.prices, how.budget
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
