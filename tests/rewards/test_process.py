"""Process reward models against plain transformers: the probability at each marker, and its three readings."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from forge.actors import RewardActor
from forge.data.packing import pack
from forge.envs.group import SingleTurnEnv
from forge.runtime.controller import ForgeActor, endpoint, shutdown
from forge.types import Completion, Prompt, Sample
from forge_verifiers.process import ProcessRewardModel
from tests.training.cases import TOKENIZER, tiny_model

RESPONSES = ["ab\n\ncd\n \nefg", "abc", "a\n\n\n\nb"]
STEPS = [["ab", "cd", "efg"], ["abc"], ["a", "b"]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for kind in (AutoModelForTokenClassification, AutoModelForCausalLM):
        found[kind] = tmp_path_factory.mktemp("process")
        tiny_model(kind=kind).save_pretrained(found[kind])
        TOKENIZER.save_pretrained(found[kind])
    return found


def scored(verifier, responses):
    async def run():
        found = await verifier.score("hi", responses), await verifier.read("hi", responses[:1])
        await verifier.close()
        return found

    return asyncio.run(run())


@pytest.mark.parametrize("kind", [AutoModelForTokenClassification, AutoModelForCausalLM])
def test_process_reward_model_scores_steps_at_step_markers(folders, kind):
    causal = kind is AutoModelForCausalLM
    settings = {"good": "p", "bad": "m"} if causal else {"label": 0}
    verifier = ProcessRewardModel(folders[kind], "prm", marker="z", joint="y", batch_tokens=40, **settings)
    found, (first,) = scored(verifier, RESPONSES)
    assert verifier.names == ("prm_min", "prm_mean", "prm_last")
    plain = kind.from_pretrained(folders[kind])
    for i, steps in enumerate(STEPS):
        ids = TOKENIZER("hi" + "y".join(step + "z" for step in steps))["input_ids"]
        at = [place for place, token in enumerate(ids) if token == TOKENIZER.convert_tokens_to_ids("z")]
        logits = plain(torch.tensor([ids])).logits[0, at]
        chosen = logits[:, TOKENIZER.convert_tokens_to_ids(["p", "m"])] if causal else logits
        good = chosen.softmax(-1)[:, 0].tolist()
        np.testing.assert_allclose(found.values[i], [min(good), float(np.mean(good)), good[-1]], atol=1e-5)
        if i == 0:
            np.testing.assert_allclose(first, good, atol=1e-5)


def test_process_reward_of_response_without_steps_is_unscored(folders):
    verifier = ProcessRewardModel(folders[AutoModelForTokenClassification], "prm", marker="z")
    found = asyncio.run(verifier.score("hi", ["ab\n\nc", " \n\n ", "a puzzle", "x" * 90]))
    assert np.isfinite(found.values[0]).all()
    assert np.isnan(found.values[1:]).all()
    assert [found.reasons[i, 2] for i in (1, 2)] == [
        "the response has no steps",
        "the text has 3 markers 'z' for 1 steps: the response contains the marker, or the tokenizer merges it",
    ]
    assert "93 tokens, and the model reads 64" in found.reasons[3, 0]
    asyncio.run(verifier.close())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"marker": "z", "good": "p"}, "both good and bad"),
        ({"marker": "z", "good": "p", "bad": "ap"}, "different tokens"),
        ({"marker": "!"}, "no token for '!'"),
        ({"marker": "z", "separator": "("}, "not a regular expression"),
        ({"marker": "z", "label": "fine"}, "label must be a class of the model .*'fine'"),
    ],
)
def test_invalid_process_reward_settings_raise(folders, settings, message):
    kind = AutoModelForCausalLM if "bad" in settings else AutoModelForTokenClassification
    with pytest.raises(ValueError, match=message):
        ProcessRewardModel(folders[kind], **settings)


def test_process_step_rewards_are_assigned_to_step_end_tokens(folders):
    """From the model's probabilities to the reward of each token in a batch."""
    words = "abqcdqefg"
    ids = TOKENIZER(words, add_special_tokens=False)["input_ids"]

    class Policy(ForgeActor):
        @endpoint
        def generate(self, prompt, n, seed):
            return [Completion(words, ids, [-1.0] * len(ids), {}, (3, 4), [0] * len(ids), "stop")] * n

    async def play():
        steps = {
            "model": {"path": str(folders[AutoModelForTokenClassification]), "marker": "z", "separator": "q"},
            "weight": 0.5,
        }
        functions = [lambda prompt, response, target: 1.0, {"use": "forge_verifiers:StepRewards", **steps}]
        reward = await RewardActor.as_local(functions)
        episodes = await SingleTurnEnv(reward, TOKENIZER).rollout(
            await Policy.as_local(), Sample(Prompt("hi", (3, 4)), ""), n=2
        )
        await shutdown()
        return episodes

    episode, _ = asyncio.run(play())
    prm = ProcessRewardModel(folders[AutoModelForTokenClassification], "prm", marker="z", separator="q")
    (good,) = scored(prm, [words])[1]
    assert episode.reward == pytest.approx(1.0 + 0.5 * sum(good) / 3)
    at = [2 + len(TOKENIZER(words[:end], add_special_tokens=False)["input_ids"]) for end in (2, 5, 9)]
    assert [end for end, _ in episode.steps] == at
    episode.advantage = 0.0
    rewards = pack([episode]).rewards
    expected = np.zeros(2 + len(ids))
    expected[np.array(at) - 1] = 0.5 * np.array(good) / 3
    expected[-1] += 1.0
    np.testing.assert_allclose(rewards, expected, atol=1e-6)
