"""An evaluation harness from PyPI as the client: EleutherAI's lm-evaluation-harness, offline."""

import asyncio
import json
import os
import subprocess

import pytest
import yaml
from transformers import AutoTokenizer

from apps.toys.words import Reverse
from forge.actors import Generator, RewardActor
from forge.envs import SingleTurnEnv
from forge.runtime.controller import run
from forge.types import Prompt, Sample
from tests.forge_agents.serving.conftest import FORGE, address
from tests.recipes.test_recipes import ROOT

MODEL = ROOT / "runs/quickstart-warmup/model"
TASK = {
    "task": "apps.toys.words:Reverse",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}>",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 10, "temperature": 0.0, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
pytestmark = [
    pytest.mark.skipif("FORGE_LM_EVAL" not in os.environ, reason="FORGE_LM_EVAL names no lm_eval (PyPI: lm-eval[api])"),
    pytest.mark.skipif(not MODEL.exists(), reason="there is no runs/quickstart-warmup: make quickstart leaves it"),
]


def our_accuracy(problems):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = [f"{row.question}>" for row in problems]
    prompts = [Prompt(text, tuple(tokenizer(text)["input_ids"])) for text in texts]
    samples = [Sample(prompt, row.answer) for prompt, row in zip(prompts, problems, strict=True)]

    async def main():
        policy, reward = await asyncio.gather(
            Generator.options().as_service(str(MODEL)), RewardActor.options().as_service(["ExactMatch"])
        )
        return (await SingleTurnEnv(reward).evaluate(policy, samples, max_tokens=10))["eval/accuracy"]

    return run(main())


def test_lm_eval_harness_accuracy_matches_forge_evaluation(launched, tmp_path):
    problems = Reverse().take(300, seed=3, difficulty=[4, 4])
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row._asdict()) + "\n" for row in problems))
    task = TASK | {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}}
    (tmp_path / "reverse.yaml").write_text(yaml.safe_dump(task))
    process = launched(*FORGE, "serve", str(MODEL), "--port", "0", "--replicas", "2", "--name", "policy")
    settings = {
        "model": "policy",
        "base_url": f"{address(process)}/completions",
        "num_concurrent": 8,
        "tokenizer_backend": None,
        "tokenized_requests": False,
    }
    command = [os.environ["FORGE_LM_EVAL"], "run", "--model", "local-completions", "--tasks", "reverse"]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in settings.items())]
    command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    found = subprocess.run(
        command,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache"), "OPENAI_API_KEY": "none"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert found.returncode == 0, found.stderr
    results = json.loads(next((tmp_path / "out").rglob("results_*.json")).read_text())["results"]["reverse"]
    ours = our_accuracy(problems)
    print(f"lm_eval {results['exact_match,none']:.4f}, forge {ours:.4f}")
    assert 0 < ours < 1, "a model that is always right, or never, tells little"
    assert results["exact_match,none"] == pytest.approx(ours, abs=1e-9)
