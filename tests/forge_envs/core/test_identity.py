"""The tokens that are trained on are those that were sampled, and their log-probabilities those of one forward pass."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from forge_envs import Dialogue, Environment, Step, rollout

from .conftest import TEXTS


class Talk(Environment):
    """Answers with what it was told, turned round, and a text in other languages."""

    async def reset(self, task, *, seed):
        self.said = 0
        return Step(({"role": "system", "content": TEXTS[task % 4]}, {"role": "user", "content": f"task {task}"}))

    async def step(self, action):
        self.said += 1
        turned = {"role": "tool", "name": "turn", "content": action.text[::-1]}
        return Step((turned, {"role": "user", "content": TEXTS[self.said % 4]}), 0.25, terminated=self.said == 4)


def play(policy, tokenizer, episodes):
    """The episodes, and for each the completions that the engine gave."""
    dialogue = Dialogue(tokenizer, "chatml")

    async def one(number):
        drawn = []

        async def route(*args, **how):
            drawn.append(await policy.generate.route(*args, **how))
            return drawn[-1]

        recorded = SimpleNamespace(generate=SimpleNamespace(route=route))
        limits = {"max_turns": 4, "max_turn_tokens": 8 + number % 17, "max_tokens": 900}
        return await rollout(recorded, Talk(), number, dialogue=dialogue, seed=number, **limits), drawn

    async def main():
        return await asyncio.gather(*map(one, range(episodes)))

    return asyncio.run(main())


@pytest.mark.parametrize("episodes", [24, pytest.param(1000, marks=pytest.mark.slow)])
def test_environment_episode_tokens_and_logprobs_match_forward_pass(engine_policy, small_model, bpe, episodes):
    model = AutoModelForCausalLM.from_pretrained(small_model, attn_implementation="eager").eval()
    worst, turns, drifted = 0.0, 0, 0
    for episode, drawn in play(engine_policy, bpe, episodes):
        assert len(drawn) == len(episode.turns) == 4
        for turn, completion in zip(episode.turns, drawn, strict=True):
            assert episode.tokens[: turn.start] == list(completion.prompt_ids)
            assert episode.tokens[turn.start : turn.end] == completion.token_ids
            assert episode.logprobs[turn.start : turn.end] == completion.logprobs
            again = bpe(bpe.decode(completion.token_ids), add_special_tokens=False)["input_ids"]
            drifted += again != completion.token_ids
            turns += 1
        tokens = torch.tensor([episode.tokens])
        with torch.inference_mode():
            logprobs = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        own = torch.tensor(episode.mask[1:])
        worst = max(worst, float((logprobs - torch.tensor(episode.logprobs[1:]))[own].abs().max()))
    print(f"{turns} turns, {drifted / turns:.0%} change under decoding and encoding; worst logprob error {worst:.1e}")
    assert worst < 1e-4
    assert drifted > turns / 4  # or this test would not tell
