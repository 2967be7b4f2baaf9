"""A language model as a judge, behind any OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from .spec import JudgeSettings
from .threads import within
from .verifier import Scores, Unscored, collect

try:
    from openai import APIConnectionError, APIStatusError, APITimeoutError, AsyncOpenAI, DefaultAsyncHttpxClient
except ImportError as error:
    raise ImportError("LM judges need the openai package: pip install 'torchforge[judge]'") from error

MILLION = 1_000_000


@dataclass
class Cost:
    """What a judge has used. `money` is in the currency of the prices; `untold` counts answers without usage."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    untold: int = 0
    money: float = 0.0


class LMJudge:
    """The share of yes among k votes, or P(yes) / (P(yes) + P(no)) of the one token that it would answer; in [0, 1].

    The `openai` client retries what may pass (no connection, no answer in time, 408, 409, 429, 5xx) after growing
    pauses or `Retry-After`; an answer that is not one of this API is retried at once. A failure that stays is no score,
    and neither is a verdict that cannot be read: votes count where they can, and more than half of them must.

    Responses are judged in the order they come, at most `concurrency` at a time. Waiting for a turn costs nothing of
    `time_limit`, nor of the timeout of a `Panel` as long as the endpoint answers some requests in it.

    Args:
        url, model, name, settings: fields of `forge.verifiers.spec.JudgeSettings`.
        api_key: sent as a bearer token.

    Raises:
        ValueError: an invalid setting; says which. ImportError: openai is not installed.
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
        self._base, self._path = url.rstrip("/"), "/chat/completions" if chat else "/completions"
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
        self._timeout, self._api_key = how.request_timeout, api_key or "none"  # never that of the environment by chance
        self._prices, self._budget = how.prices, how.budget
        self._at: tuple[asyncio.AbstractEventLoop, AsyncOpenAI, asyncio.Semaphore] | None = None

    @property
    def fingerprint(self) -> str:
        """Of the question and how it is asked; not of the model that the endpoint serves under its name."""
        asked = (self._base + self._path, self._fixed, self._system, self._template, self._votes, self._yes, self._no)
        return f"judge {asked!r}"

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """One number for each response."""
        client, turns = self._connected()

        async def in_turn(response: str) -> float:
            async with turns:
                judged = self._judge(client, prompt, response, target)
                return await within(self._time_limit, judged, f"the judge {self.names[0]}")

        return await collect([in_turn(response) for response in responses], 1)

    async def close(self) -> None:
        """Closes its connections; requests that are under way fail."""
        if self._at is not None:
            await self._at[1].close()
            self._at = None

    async def _judge(self, client: AsyncOpenAI, prompt: str, response: str, target: str | None) -> float:
        if "target" in self._fields and target is None:
            raise Unscored("the template asks for a target, and there is none")
        text = self._template.format(prompt=prompt, response=response, target=target)
        system = [{"role": "system", "content": self._system}] if self._system is not None else []
        question = {"messages": [*system, {"role": "user", "content": text}]} if self._chat else {"prompt": text}
        if not self._by_votes:
            return self._likelihood((await self._ask(client, {**self._fixed, **question}))[0])
        verdicts: list[bool | None] = []
        while (left := self._votes - len(verdicts)) > 0:
            # Not every endpoint supports n: what is missing is asked for again.
            several = {"n": left} if left > 1 else {}
            choices = await self._ask(client, {**self._fixed, **question, **several})
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
            raise Unscored("the endpoint gives no log-probabilities: set scoring to votes") from None
        yes, no = (
            sum(math.exp(logprob) for token, logprob in likely if token.strip().lower() == word)
            for word in (self._yes, self._no)
        )
        if not yes + no:
            raise Unscored(f"neither {self._yes} nor {self._no} is among the top tokens {[t for t, _ in likely]}")
        return yes / (yes + no)

    async def _ask(self, client: AsyncOpenAI, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The choices of an answer. Unscored: all tries failed, or the budget is spent."""
        url = self._base + self._path
        for _ in range(self._retries + 1):
            if self._budget is not None and self.cost.money >= self._budget:
                raise Unscored(f"the budget of {self._budget:g} is spent")
            if self._budget is not None and self.cost.untold:
                raise Unscored("the endpoint does not say what it uses: a budget cannot be kept")
            try:
                # As plain JSON: endpoints differ from the client's types, and those are not checked.
                found: Any = await client.post(self._path, cast_to=object, body=body)
            except ValueError as error:
                found = str(error)  # not JSON
            except APITimeoutError as error:
                raise Unscored(f"{url} gave no answer within {self._timeout:g} s{_tried(error)}") from None
            except APIConnectionError as error:
                cause = error.__cause__ or error
                raise Unscored(f"{url} could not be asked ({type(cause).__name__}: {cause}){_tried(error)}") from None
            except APIStatusError as error:
                text = error.response.text[:200]
                raise Unscored(f"{url} answered {error.status_code}: {text!r}{_tried(error)}") from None
            try:
                texts = [
                    choice["message"].get("content") if self._chat else choice["text"] for choice in found["choices"]
                ]
                if not texts or not all(isinstance(text, str | None) for text in texts):
                    raise TypeError("the answer is no text")
            except (ValueError, LookupError, TypeError, AttributeError):
                continue
            self.progress += 1
            try:
                asked, answered = (int(found["usage"][f"{kind}_tokens"]) for kind in ("prompt", "completion"))
                self.cost.prompt_tokens += asked
                self.cost.completion_tokens += answered
                self.cost.money += (asked * self._prices[0] + answered * self._prices[1]) / MILLION
            except (KeyError, TypeError, ValueError):
                self.cost.untold += 1
            return found["choices"]
        raise Unscored(f"{url} gave what is no answer: {str(found)[:120]!r}, tried {self._retries + 1} times")

    def _connected(self) -> tuple[AsyncOpenAI, asyncio.Semaphore]:
        """Of the loop that runs: neither serves another."""

        async def count(request: Any) -> None:
            self.cost.requests += 1

        loop = asyncio.get_running_loop()
        if self._at is None or self._at[0] is not loop or self._at[1].is_closed():
            client = AsyncOpenAI(
                api_key=self._api_key,
                base_url=self._base,
                max_retries=self._retries,
                timeout=self._timeout,
                http_client=DefaultAsyncHttpxClient(event_hooks={"request": [count]}),
            )
            self._at = (loop, client, asyncio.Semaphore(self._concurrency))
        return self._at[1:]


def _tried(error: APIConnectionError | APIStatusError) -> str:
    tries = int(error.request.headers.get("x-stainless-retry-count", 0)) + 1
    return f", tried {tries} times" if tries > 1 else ""
