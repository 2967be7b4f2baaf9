"""`forge serve` as a user starts it."""

import signal

import openai
import pytest

from forge.cli import main
from tests.forge_agents.serving.conftest import FORGE, address, interrupted


@pytest.mark.full
def test_forge_serve_answers_requests_until_sigint(launched, model):
    process = launched(*FORGE, "serve", str(model), "--port", "0", "--name", "mine")
    client = openai.OpenAI(base_url=address(process), api_key="none", max_retries=0)
    said = [{"role": "user", "content": "hello"}]
    # Greedy: an untrained model that samples may well end its answer with the first token.
    answer = client.chat.completions.create(model="mine", messages=said, max_tokens=5, temperature=0)
    assert answer.choices[0].message.content
    # One that is in the middle of an answer is no reason to stay.
    stream = client.completions.create(model="mine", prompt="a", n=16, max_tokens=200, stream=True)
    assert next(stream).choices
    assert interrupted(process) == 128 + signal.SIGINT
    client.close()


@pytest.mark.parametrize(
    ("args", "says"),
    [(["nowhere"], "model directory nowhere does not exist"), (["nowhere", "--port", "x"], "invalid int value")],
)
def test_invalid_forge_serve_arguments_raise_one_line_error(capsys, args, says):
    with pytest.raises(SystemExit) as ended:
        main(["serve", *args])
    assert says in f"{ended.value} {capsys.readouterr().err}"
