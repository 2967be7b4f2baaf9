"""Traffic that a server records: exact tokens, whatever ends the server, and rows that SFT and DPO train."""

import json
import os
import re
import signal
import subprocess
import sys

import anthropic
import openai
import pytest

import forge
from forge.data.load import load_data
from forge.models import build_small_model
from forge.models.tokenizer import PRINTABLE, open_tokenizer
from forge_agents.recorded import RECORDING, recorded_rows

pytestmark = pytest.mark.processes

FORGE = [sys.executable, "-c", "from forge.cli import main; main()"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '>' }}{% endfor %}"


def make_model(folder, seed):
    built = build_small_model(
        folder, seed=seed, alphabet=PRINTABLE, hidden_size=32, layers=2, heads=2, kv_heads=1, max_positions=256
    )
    tokenizer = open_tokenizer(str(built))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(built)
    (folder / "checksums.txt").unlink()
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny", 0)


class Recorder:
    """A process of `forge serve --record`."""

    def __init__(self, model, folder, *options, key=None):
        env = {**os.environ, **({"FORGE_API_KEY": key} if key else {})}
        words = ["serve", str(model), "--name", "tiny", "--port", "0", "--record", str(folder), *options]
        self.process = subprocess.Popen(
            [*FORGE, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            start_new_session=True,
        )
        self.said = []
        self.url = None
        for line in self.process.stdout:
            self.said.append(line)
            if match := re.search(r"is served at (\S+)/v1 ", line):
                self.url = match[1]
                break

    def client(self, key="none"):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def end(self, number=signal.SIGKILL):
        os.killpg(self.process.pid, number)
        self.rest = self.process.communicate(timeout=30)[0]


def ask(client, messages, **settings):
    return client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, **settings)


def said(text):
    return {"role": "user", "content": text}


def turn(text):
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def recorded(model, processes, tmp_path_factory):
    """A folder with the traffic of clients, whose server was killed, and the texts that they received."""
    folder = tmp_path_factory.mktemp("traffic") / "folder"
    server = Recorder(model, folder)
    texts = {}
    alice = server.client("alice")
    first = ask(alice, [said("ab")]).choices[0].message.content
    stream = ask(alice, [said("ab"), turn(first), said("more")], stream=True)
    texts["long"] = [first, "".join(chunk.choices[0].delta.content or "" for chunk in stream)]
    # Three samples, of which the second is continued.
    bob = server.client("bob")
    samples = [choice.message.content for choice in ask(bob, [said("pick")], n=3).choices]
    texts["samples"] = samples
    texts["picked"] = [samples[1], ask(bob, [said("pick"), turn(samples[1]), said("on")]).choices[0].message.content]
    # One that was asked for again, whose second answer is continued.
    carol = server.client("carol")
    again = [ask(carol, [said("again")], seed=seed).choices[0].message.content for seed in (1, 2)]
    texts["again"] = [*again, ask(carol, [said("again"), turn(again[1]), said("so")]).choices[0].message.content]
    dave = anthropic.Anthropic(base_url=server.url, api_key="dave", max_retries=0)
    answer = dave.messages.create(model="tiny", max_tokens=9, messages=[said("hi")])
    texts["anthropic"] = [answer.content[0].text]
    # An answer that is not complete when the server dies: it may not end before its 200th letter.
    schema = {"name": "long", "schema": {"type": "string", "minLength": 200}}
    cut = server.client("eve").chat.completions.create(
        model="tiny",
        messages=[said("cut")],
        max_tokens=230,
        stream=True,
        response_format={"type": "json_schema", "json_schema": schema},
    )
    next(chunk for chunk in cut if chunk.choices[0].delta.content)
    server.end()
    # Some dialects leave out white space at the ends.
    return folder, {name: [text.strip() for text in answers] for name, answers in texts.items()}


def spoken(rows, tokenizer):
    """The trained texts of each row."""
    texts = []
    for row in rows:
        spans = []
        for token, trained in zip(row["token_ids"], row["trained"], strict=True):
            if not trained:
                spans.append([])
            else:
                spans[-1].append(token)
        texts.append([plain(span, tokenizer) for span in spans if span])
    return texts


def plain(tokens, tokenizer):
    """The text of an answer, as its client gets it."""
    return tokenizer.decode(tokens).removesuffix(tokenizer.eos_token).strip()


def test_what_clients_received_is_what_is_trained(recorded, model):
    folder, texts = recorded
    tokenizer = open_tokenizer(str(model))
    rows = recorded_rows(str(folder), "supervised", tokenizer)
    found = spoken(rows, tokenizer)
    for name in ("long", "picked", "anthropic"):
        assert texts[name] in found
    # Answers that another one was preferred to are in no row, and nothing is there twice.
    everything = [text for row in found for text in row]
    assert sorted(everything) == sorted([*texts["long"], *texts["picked"], *texts["again"][1:], *texts["anthropic"]])
    assert not any("cut" in tokenizer.decode(row["token_ids"]) for row in rows)


def test_answers_that_were_not_continued_are_rejected(recorded, model):
    folder, texts = recorded
    tokenizer = open_tokenizer(str(model))
    pairs = recorded_rows(str(folder), "preferences", tokenizer)

    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    found = sorted(tuple(plain(pair[name], tokenizer) for name in names) for pair in pairs)
    samples, again = texts["samples"], texts["again"]
    assert found == sorted(
        [("again>", again[1], again[0]), ("pick>", samples[1], samples[0]), ("pick>", samples[1], samples[2])]
    )


def test_sft_and_dpo_train_the_rows(recorded, model, tmp_path):
    folder, _ = recorded
    common = {"run": {"root": str(tmp_path)}, "training": {"seq_len": 256, "warmup_steps": 0, "learning_rate": 1e-2}}
    sft = forge.sft(str(model), dataset=str(folder), name="sft", steps=12, batch_size=4, **common)
    losses = [row["train/loss"] for row in sft.metrics if "train/loss" in row]
    assert losses[-1] < losses[0] - 0.5
    dpo = forge.dpo(str(model), dataset=str(folder), name="dpo", steps=8, batch_size=2, **common)
    losses = [row["train/loss"] for row in dpo.metrics if "train/loss" in row]
    assert losses[0] == pytest.approx(0.693, abs=0.01)
    assert losses[-1] < losses[0] - 0.1


def test_what_is_no_recording_for_a_model(recorded, model, tmp_path):
    folder, _ = recorded
    tokenizer = open_tokenizer(str(model))
    with pytest.raises(ValueError, match="answers and no targets"):
        load_data(tokenizer, path=str(folder))
    with pytest.raises(ValueError, match="chat_template would do nothing"):
        load_data(tokenizer, kind="supervised", path=str(folder), chat_template=True)
    tokenizer.add_tokens(["new"])
    with pytest.raises(ValueError, match="whose tokenizer is another one"):
        load_data(tokenizer, kind="supervised", path=str(folder))
    (tmp_path / RECORDING).write_bytes((folder / RECORDING).read_bytes())
    with pytest.raises(ValueError, match="has no supervised rows"):
        load_data(open_tokenizer(str(model)), kind="supervised", path=str(tmp_path))
    (tmp_path / "traffic-1.jsonl").write_text('{"session": "a", "kind": "turn"}\n')
    with pytest.raises(ValueError, match="line 1 is damaged"):
        load_data(open_tokenizer(str(model)), kind="supervised", path=str(tmp_path))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"token_ids": [5, 6], "trained": [0]}, "2 token_ids, and 1 values"),
        ({"token_ids": [5, 999], "trained": [0, 1]}, "token ids below"),
        ({"token_ids": [5, 6], "trained": [0, 0]}, "nothing to learn"),
        ({"token_ids": [5, 6], "trained": [1, 1]}, "nothing precedes"),
    ],
)
def test_rows_of_tokens_that_cannot_be(model, tmp_path, row, problem):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=problem):
        load_data(open_tokenizer(str(model)), kind="supervised", path=str(file))
