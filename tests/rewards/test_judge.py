"""Judges against a real little server that can fail in every way, and against the library's own endpoint."""

import asyncio
import math
import socket
from time import monotonic

import pytest
from aiohttp import web

from forge_verifiers import LMJudge, Panel
from tests.forge_agents.serving.conftest import model, served, tokenizer  # noqa: F401


def chat(*texts):
    choices = [{"index": i, "message": {"role": "assistant", "content": text}} for i, text in enumerate(texts)]
    return web.json_response({"choices": choices})


class Endpoint:
    """Answers each request with the next of `answers`: a function of the request's body, or what it gives."""

    def __init__(self, *answers, default=None):
        self.answers, self.default = list(answers), default or (lambda body: chat("yes"))
        self.bodies, self.headers, self.at, self.open, self.most = [], [], [], 0, 0

    async def answer(self, request):
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        self.at.append(monotonic())
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            how = self.answers.pop(0) if self.answers else self.default
            found = how(self.bodies[-1]) if callable(how) else how
            if asyncio.iscoroutine(found):
                found = await found
            if found is None:
                request.transport.abort()
                return web.Response()
            return found
        finally:
            self.open -= 1

    def judged(self, responses, target=None, panel=None, **settings):
        """What a judge says of responses to a prompt while this serves; and the judge."""

        async def run():
            app = web.Application()
            app.router.add_post("/v1/{kind:.*}", self.answer)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = site._server.sockets[0].getsockname()[1]
            judge = LMJudge(f"http://127.0.0.1:{port}/v1", "m", **settings)
            try:
                return await (Panel([judge], **panel) if panel else judge).score("1 + 1?", responses, target), judge
            finally:
                await judge.close()
                await runner.cleanup()

        return asyncio.run(run())


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)


def test_llm_judge_with_one_vote_scores_the_parsed_verdict():
    def answer(body):
        return chat("I think... No. Wait:\nYES!" if "2}" in body["messages"][1]["content"] else "No.")

    endpoint = Endpoint(default=answer)
    found, _ = endpoint.judged(["{2}", "{3}"], system_prompt="be", api_key="key")
    assert found.values[:, 0].tolist() == [1.0, 0.0]
    assert not found.reasons
    body = endpoint.bodies[0]
    assert (body["model"], body["max_tokens"], body["messages"][0]) == ("m", 16, {"role": "system", "content": "be"})
    assert "1 + 1?" in body["messages"][1]["content"]
    assert endpoint.headers[0]["Authorization"] == "Bearer key"
    assert len(endpoint.bodies) == 2


def test_unreadable_judge_verdict_is_unscored():
    found, _ = Endpoint(default=lambda body: chat("yes", "eyes", "nobody", "")).judged(["2"], votes=4)
    assert found.reasons == {(0, 0): "1 of 4 verdicts could be read; the last answer was ''"}


def test_llm_judge_score_is_computed_from_token_logprobs():
    likely = {" Yes": math.log(0.5), "yes": math.log(0.1), "no": math.log(0.2), "Nope": math.log(0.1)}

    def answer(body):
        text = str(body)
        tokens = {"So": -0.1} if "odd" in text else likely
        if "none" in text:
            return web.json_response({"choices": [{"message": {"content": "yes"}}]})
        top = [{"token": token, "logprob": logprob} for token, logprob in tokens.items()]
        logprobs = {"content": [{"token": "So", "logprob": -1, "top_logprobs": top}]}
        return web.json_response({"choices": [{"message": {"content": "So"}, "logprobs": logprobs}]})

    server = Endpoint(default=answer)
    found, _ = server.judged(["2", "odd", "none"], scoring="logprob")
    assert found.values[0, 0] == pytest.approx(0.6 / 0.8)
    assert found.reasons[1, 0] == "neither yes nor no is among the top tokens ['So']"
    assert found.reasons[2, 0] == "the judge's endpoint returns no log-probabilities: set scoring to votes"
    assert {"logprobs": True, "top_logprobs": 5}.items() <= server.bodies[0].items()
    spaced, _ = server.judged(["2"], scoring="logprob", yes=" Yes", no=" No")
    assert spaced.values.item() == found.values[0, 0]


async def hang(body):
    await asyncio.sleep(30)


PASSING = {
    "busy": (lambda body: web.Response(status=429, text="slow down"), "answered 429: 'slow down'"),
    "broken": (lambda body: web.Response(status=500), "answered 500"),
    "hangs": (lambda body: hang(body), "did not respond within 1 s"),
    "garbage": (lambda body: web.Response(text="<html>"), "gave an invalid answer: '<html>'"),
    "no choices": (lambda body: web.json_response({"choices": []}), "gave an invalid answer"),
    "odd choices": (lambda body: web.json_response({"choices": [{"message": "yes"}]}), "gave an invalid answer"),
    "no message": (lambda body: web.json_response({"choices": ["yes"]}), "gave an invalid answer"),
    "another kind": (lambda body: web.json_response({"choices": [{"text": "yes"}]}), "gave an invalid answer"),
    "no text": (lambda body: chat(["yes"]), "gave an invalid answer"),
    "another interface": (lambda body: web.json_response(["yes"]), "gave an invalid answer"),
    "reset": (lambda body: None, "no connection to"),
}


@pytest.mark.costly
@pytest.mark.parametrize("kind", PASSING)
def test_transient_judge_failure_is_retried(kind):
    failure, reason = PASSING[kind]
    settings = {"request_timeout": 1.0 if kind == "hangs" else 30.0, "retries": 2}
    endpoint = Endpoint(failure, failure)
    found, _ = endpoint.judged(["2"], **settings)
    assert found.values.item() == 1.0
    endpoint = Endpoint(default=failure)
    found, _ = endpoint.judged(["2"], **settings)
    assert math.isnan(found.values.item())
    assert reason in found.reasons[0, 0]
    assert len(endpoint.bodies) == 3


def test_unreachable_judge_is_unscored():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        judge = LMJudge(f"http://127.0.0.1:{free.getsockname()[1]}/v1", "m", retries=1)

        async def run():
            found = await judge.score("p", ["r"])
            await judge.close()
            return found

        reason = asyncio.run(run()).reasons[0, 0]
        assert reason.startswith("no connection to http://127.0.0.1")
        assert "(ConnectError" in reason


@pytest.mark.costly
def test_judge_time_limit_covers_all_votes_of_a_response():
    endpoint = Endpoint(default=lambda body: hang(body) if "slow" in str(body) else chat("yes"))
    found, _ = endpoint.judged(["2", "slow"], time_limit=2.0)
    assert found.values[0, 0] == 1.0
    assert found.reasons == {(1, 0): "the judge m took more than 2 s"}


@pytest.mark.costly
def test_judge_queueing_does_not_count_toward_time_limit():
    async def later(body):
        await asyncio.sleep(0.05)
        return chat("yes")

    # All of them take at least 2.5 s, each of them a fraction of its limit, also on a busy machine.
    settings = {"concurrency": 2, "time_limit": 2.0}
    found, _ = Endpoint(default=later).judged(["2"] * 100, panel={"timeout": 2.0}, **settings)
    assert not found.reasons
    endpoint = Endpoint(default=hang)
    found, _ = endpoint.judged(["2"] * 50, panel={"timeout": 0.5}, **settings)
    assert set(found.reasons.values()) == {"the verifier made no progress for 0.5 s"}
    assert len(endpoint.bodies) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "localhost"}, "url must start"),
        ({"template": "{prompt}"}, "must hold {response}"),
        ({"template": "{response} {answer}"}, "must hold {response}"),
        ({"scoring": "logprob", "votes": 3}, "asks once"),
        ({"votes": 3, "temperature": 0}, "all the same"),
        ({"votes": 0}, "at least 1"),
    ],
)
def test_invalid_judge_settings_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        LMJudge(**{"url": "http://localhost/v1", "model": "m", **settings})


@pytest.mark.slow
def test_llm_judge_reads_verdicts_from_forge_serve(served):  # noqa: F811
    async def run():
        # A random model: words that it does say.
        judge = LMJudge(served.address, "tiny", template="{response}?", votes=6, yes="a", no="b", max_tokens=200)
        try:
            return await Panel([judge]).score("p", ["hello", "you"])
        finally:
            await judge.close()

    found = asyncio.run(run())
    for i in (0, 1):
        assert 0 <= found.values[i, 0] <= 1 or "verdicts could be read" in found.reasons[i, 0]
