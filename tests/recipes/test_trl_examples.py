"""TRL's examples with their names changed, as docs/start/from_trl.md shows them, on a tiny chat model."""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

import forge
from forge.recipes.result import Result
from tests.data.templates import CHATML, byte_pairs

pytestmark = pytest.mark.processes
PAGE = Path(__file__).parents[2] / "docs/start/from_trl.md"
DIFFS = [
    block for block in re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL) if block.startswith("-from trl")
]


def script(diff: str, kept: str) -> str:
    """The lines of one side of a diff: `-` is TRL's script, `+` ours."""
    return "\n".join(line[1:] for line in diff.splitlines() if line[:1] in (" ", kept)) + "\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("chat") / "model"
    tokenizer = byte_pairs()
    tokenizer.chat_template = CHATML
    tokenizer.pad_token = tokenizer.eos_token
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def talk(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


SUMS = [(f"What is {i} + 1?", str(i + 1)) for i in range(8)]
ROWS: dict[str, list[dict[str, Any]]] = {
    "grpo": [{"prompt": talk(question), "solution": result} for question, result in SUMS],
    "sft": [{"prompt": talk(question), "completion": answer(result)} for question, result in SUMS],
    "dpo": [{"prompt": talk(q), "chosen": answer(r), "rejected": answer("no")} for q, r in SUMS],
}


def test_forge_examples_on_trl_page_keep_rewards_and_are_shorter():
    assert len(DIFFS) == 3
    for diff in DIFFS:
        trl = script(diff, "-")
        ours = script(diff, "+")
        compile(trl, "trl.py", "exec")
        # Rewards stay as they are: what is between the imports and the trainer is the same text.
        functions = re.findall(r"def .*?\n\n", trl, re.DOTALL)
        assert all(function in ours for function in functions)
        assert "Trainer" not in ours
        assert len(ours.splitlines()) < len(trl.splitlines())


@pytest.mark.parametrize("number", range(3), ids=["grpo", "sft", "dpo"])
def test_forge_code_of_each_trl_page_diff_runs(
    number: int, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    name = ["grpo", "sft", "dpo"][number]
    results: list[Result] = []
    call = {"grpo": "train"}.get(name, name)
    original = getattr(forge, call)

    def recorded(*args: Any, **settings: Any) -> Result:
        # Tiny: what the page leaves at its default is of real models. The rewards run in a process of their own.
        results.append(original(*args, seq_len=256, **settings))
        return results[-1]

    monkeypatch.setattr(forge, call, recorded)
    code = compile(script(DIFFS[number], "+"), f"{name}.py", "exec")
    exec(code, {"model": model, "dataset": ROWS[name], "__name__": "__main__"})
    [result] = results
    rows = result.metrics
    assert rows[-1]["step"] == 2
    assert Path(result.model, "model.safetensors").exists()
    if name == "grpo":
        assert {"reward/accuracy_reward", "reward/format_reward"} <= rows[-1].keys()
        parts = sum(row["reward/accuracy_reward"] + row["reward/format_reward"] for row in rows if "reward" in row)
        assert parts == pytest.approx(sum(row["reward"] for row in rows if "reward" in row), abs=1e-5)
        assert "Be brief." in result.rollouts[0]["prompt"]
    else:
        assert rows[-1]["train/loss"] > 0
