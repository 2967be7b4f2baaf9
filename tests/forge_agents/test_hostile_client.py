"""A client that does to its history all that clients do, in three dialects: no token is lost, doubled or misplaced."""

import asyncio
import json
import random
from collections import Counter
from contextlib import suppress

import httpx
import pytest

from forge_agents.record import Certificate
from forge_agents.settings import SessionSettings
from forge_agents.tree import collapse_spaces

from .conftest import serving

TOOLS = [
    {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}},
]
WORDS = ["the", "fox", "jumps", "over", "a", "lazy", "dog", "who", "says", "hello", "to", "every", "indented", "text"]


def sentence(rng, count=12):
    return " ".join(rng.choice(WORDS) for _ in range(count))


def turn_of(rng):
    """What the policy says next; None: whatever it samples."""
    kind = rng.random()
    if kind < 0.4:
        return None
    text = sentence(rng)
    if rng.random() < 0.5:
        text = f"<think>\n{sentence(rng, 5)}\n</think>\n\n{text}"
    if kind > 0.7:
        call = {"name": "run", "arguments": {"cmd": sentence(rng, 3), "n": rng.randrange(9), "in": {"a": 1, "b": [2]}}}
        text += "".join(f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>" for _ in range(rng.choice((1, 1, 2))))
    return text


class HostileClient:
    """One episode's client. Messages are in the form of Chat Completions; other dialects are written from them."""

    def __init__(self, http, access, rng):
        self.http, self.access, self.rng = http, access, rng
        self.expected = Counter()
        self.gave_up = False
        self.invented = set()

    async def play(self):
        messages = self.begun("start")
        for _ in range(self.rng.randrange(2, 6)):
            answer = await self.ask(messages)
            if answer is None:
                return
            if set(answer) == {"role", "content"} and not answer["content"]:
                # At the limit of tokens answers are empty, and no turns.
                self.gave_up = True
                return
            messages = [*messages, answer]
            messages = self.continued(messages)
            messages = self.changed(messages)
        await self.ask(messages)

    def begun(self, reason):
        self.expected[reason] += 1
        system = {"role": "system", "content": sentence(self.rng, 4)}
        return [system, {"role": "user", "content": sentence(self.rng, 6)}]

    def continued(self, messages):
        calls = messages[-1].get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": call["id"], "content": sentence(self.rng, 4)} for call in calls]
        return [*messages, *(results or [{"role": "user", "content": sentence(self.rng, 5)}])]

    def changed(self, messages):
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        action = self.rng.choice(("none", "none", "fork", "compact", "edit", "agent"))
        if action == "fork" and len(turns) > 1:
            # From an earlier turn on, with other words.
            cut = self.rng.choice(turns[:-1]) + 1
            if not messages[cut - 1].get("tool_calls"):
                # A turn that this client has invented is no turn of the policy's.
                self.expected["edited"] += messages[cut - 1]["content"] in self.invented
                return [*messages[:cut], {"role": "user", "content": sentence(self.rng, 7)}]
        if action == "compact":
            content = messages[turns[-1]]["content"] or ""
            if len(collapse_spaces(content)) > 45 and "\ufffd" not in content:
                self.expected["start"] += 1
                return [messages[0], {"role": "user", "content": f"So far: {content}"}]
        if action == "edit":
            messages = [dict(message) for message in messages]
            messages[turns[-1]]["content"] = sentence(self.rng, 9)
            messages[turns[-1]].pop("reasoning_content", None)
            self.invented.add(messages[turns[-1]]["content"])
            self.expected["edited"] += 1
            return messages
        if action == "agent":
            return self.begun("start")
        return messages

    def disguised(self, messages):
        """The same history in another spelling."""
        rewritten = []
        for message in map(dict, messages):
            if message["role"] == "assistant":
                if self.rng.random() < 0.5:
                    message.pop("reasoning_content", None)
                if self.rng.random() < 0.5 and message["content"]:
                    message["content"] = " " + message["content"].replace(" ", "  ") + "\n"
                if message.get("tool_calls"):
                    message["tool_calls"] = [self.reordered(call) for call in message["tool_calls"]]
            rewritten.append(message)
        return rewritten

    def reordered(self, call):
        items = list(json.loads(call["function"]["arguments"]).items())
        self.rng.shuffle(items)
        text = json.dumps(dict(items), indent=self.rng.choice((None, 1)))
        return {**call, "function": {**call["function"], "arguments": text}}

    async def ask(self, messages):
        dialect = self.rng.choice((chat, anthropic, responses))
        tools = [dict(reversed(tool.items())) for tool in reversed(TOOLS)] if self.rng.random() < 0.3 else TOOLS
        path, body = dialect(self.disguised(messages), tools)
        if self.rng.random() < 0.3:
            # The connection drops; the client asks again, or gives up.
            with suppress(TimeoutError):
                async with asyncio.timeout(self.rng.random() * 0.02):
                    return read(dialect, await self.send(path, body))
            if self.rng.random() < 0.3:
                self.gave_up = True
                return None
        return read(dialect, await self.send(path, body))

    async def send(self, path, body):
        headers = {"x-api-key": self.access.key}
        answer = await self.http.post(f"{self.access.url}/v1{path}", json=body, headers=headers, timeout=300)
        assert answer.status_code == 200, answer.text
        return answer.json()


def chat(messages, tools):
    return "/chat/completions", {"model": "policy", "messages": messages, "tools": tools}


def anthropic(messages, tools):
    system, *rest = messages
    written = []
    for message in rest:
        if message["role"] == "user":
            written.append(message)
        elif message["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            if written[-1]["role"] == "user" and isinstance(written[-1]["content"], list):
                written[-1]["content"].append(block)
            else:
                written.append({"role": "user", "content": [block]})
        else:
            blocks = []
            if message.get("reasoning_content"):
                blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": "x"})
            if message["content"]:
                blocks.append({"type": "text", "text": message["content"]})
            for call in message.get("tool_calls") or []:
                function = call["function"]
                arguments = json.loads(function["arguments"])
                blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
            written.append({"role": "assistant", "content": blocks})
    converted = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in tools]
    body = {"model": "policy", "system": system["content"], "messages": written, "max_tokens": 500}
    return "/messages", {**body, "tools": converted}


def responses(messages, tools):
    items = []
    for message in messages:
        if message["role"] == "tool":
            items.append(
                {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
            )
            continue
        if message.get("reasoning_content"):
            summary = [{"type": "summary_text", "text": message["reasoning_content"]}]
            items.append({"type": "reasoning", "id": "rs_1", "summary": summary, "content": None})
        if message["content"] or not message.get("tool_calls"):
            kind = "output_text" if message["role"] == "assistant" else "input_text"
            parts = [{"type": kind, "text": message["content"] or ""}]
            items.append({"type": "message", "role": message["role"], "content": parts})
        for call in message.get("tool_calls") or []:
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    converted = [{"type": "function", **tool["function"]} for tool in tools]
    return "/responses", {"model": "policy", "input": items, "tools": converted}


def read(dialect, answer):
    """The message of an answer, in the form of Chat Completions."""
    if dialect is chat:
        message = answer["choices"][0]["message"]
        return {name: value for name, value in message.items() if value is not None} | {"content": message["content"]}
    content, thought, calls = "", "", []
    for part in answer["content"] if dialect is anthropic else answer["output"]:
        if part["type"] == "text":
            content += part["text"]
        elif part["type"] == "message":
            content += "".join(piece["text"] for piece in part["content"])
        elif part["type"] == "thinking":
            thought = part["thinking"]
        elif part["type"] == "reasoning":
            thought = "".join(piece["text"] for piece in part["summary"])
        elif part["type"] == "tool_use":
            calls.append((part["id"], part["name"], json.dumps(part["input"])))
        else:
            calls.append((part["call_id"], part["name"], part["arguments"]))
    message = {"role": "assistant", "content": content}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {"id": key, "type": "function", "function": {"name": name, "arguments": text}} for key, name, text in calls
        ]
    return message


async def play_all(gateway, run, seeds):
    """The client of each episode, with its session's key."""
    limit = asyncio.Semaphore(8)

    async def play(seed):
        async with limit, httpx.AsyncClient() as http:
            access = gateway.open(SessionSettings(name=str(seed), max_tokens=1000, max_turn_tokens=None, seed=seed))
            client = HostileClient(http, access, random.Random(seed))
            await client.play()
            return access.key, client

    return await asyncio.gather(*map(play, seeds))


def check(policy, tokenizer, count):
    rng = random.Random(count)
    policy.script = lambda prompt: turn_of(rng)
    policy.sampled = 0
    totals = Certificate()
    with serving(policy, tokenizer) as (gateway, run):
        played = asyncio.run(play_all(gateway, run, range(count)))
        for key, client in played:
            session = gateway.sessions[key]
            while session.open_generations:
                run(asyncio.sleep(0.01))
            record = run(gateway.close(key))
            # Of a request that came again before its connection was seen to be closed there are two answers.
            branches = {(run.reason, run.parent, run.context) for run in record.runs["policy"] if run.reason}
            differences = Counter(reason for reason, *_ in branches)
            # What a client gave up may never have arrived, and at a limit there is no turn.
            missing = client.expected - differences
            has_end = client.gave_up or bool(record.counts.get("limited"))
            assert not differences - client.expected
            assert missing.total() <= has_end
            episode = record.episode("policy", 1.0)
            account = record.unlearned("policy") if episode is None else Certificate(episode.info["certificate"])
            totals.update(account)
            if episode is None:
                continue
            branches = (*episode.branches, episode)
            assert sum(sum(branch.mask) for branch in branches) == account["trained"]
            for branch in branches:
                expected_logprobs = policy.logprobs(branch.tokens)
                for trained, logprob, reference in zip(branch.mask, branch.logprobs, expected_logprobs, strict=True):
                    assert not trained or abs(logprob - reference) < 1e-5
    totals.check()
    assert totals["sampled"] == policy.sampled
    assert totals["orphan"] > 0
    assert totals["trained"] > 0.5 * totals["sampled"]


@pytest.mark.full
def test_sampled_token_accounting_is_exact_for_hostile_client(forced_policy, bpe):
    check(forced_policy, bpe, 40)
