# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 6. A reward without labels: Weaver
#
# Often there is no exact reward, only weak verifiers: judges and rules that are wrong in many cases. If they err
# independently, their agreement shows how accurate each of them is, without a single label (Saad-Falcon et al. 2025).
# `forge_weaver` turns their scores into one calibrated probability, which can be the reward. About a minute and a half
# on a CPU. It needs scipy, scikit-learn and matplotlib.
#
# ## A policy and its responses
#
# The task is that of the first tutorial: spell words backwards. A short warm-up leaves a model that is right sometimes.

# %%
import hashlib
import random
from itertools import pairwise

import forge

rng = random.Random(0)
words = sorted({"".join(rng.choices("abcdefgh", k=rng.randint(3, 4))) for _ in range(1500)})
rng.shuffle(words)
rows = [{"question": word, "answer": word[::-1]} for word in words]
held_out, training = rows[:128], rows[128:]
warm_up = forge.sft(
    None,
    from_scratch={"alphabet": "abcdefgh>", "hidden_size": 64, "layers": 2, "max_positions": 16},
    dataset=training,
    prompt_template="{question}>",
    name="weaver-warm-up",
    run={"overwrite": True},
    eval={"problems": 0, "accuracy": False},
    steps=45,
    batch_size=64,
    learning_rate=3e-3,
    seq_len=512,
)
prompts = [row["question"] + ">" for row in training[:300]]
responses = forge.generate(warm_up.model, prompts, n=8, max_tokens=6, temperature=1.0, seed=0)
print(prompts[0], [completion.text for completion in responses[0]])

# %% [markdown]
# ## Weak verifiers
#
# Five simulated judges give verdicts of 1 or 0. Each is wrong in a fixed share of cases, from 15 to 40 %. Which cases
# these are depends on the judge, prompt and response, so a judge does not correct itself when asked again. In your own
# task these would be reward models, judges behind an endpoint, or rules.

# %%
ERRORS = {"ann": 0.15, "ben": 0.2, "cleo": 0.25, "dan": 0.3, "eve": 0.4}


def judge(name):
    def verdict(prompt, response, target=None):
        digest = hashlib.sha256(f"{name} {prompt} {response}".encode()).digest()
        wrong = int.from_bytes(digest[:4], "big") / 2**32 < ERRORS[name]
        right = response == prompt[-2::-1]
        return float(right != wrong)

    return verdict


# %%
from forge_verifiers import Panel, Rule
from forge_weaver import Problem, score_table

panel = Panel([Rule(judge(name), name) for name in ERRORS])
problems = [
    Problem(prompt, [completion.text for completion in group]) for prompt, group in zip(prompts, responses, strict=True)
]
table = await score_table(panel, problems)  # noqa: F704 (a notebook awaits)
print(table.scores.shape, "problems, responses, verifiers; labels:", table.labels)

# %% [markdown]
# ## One probability
#
# `Auto` looks at the table and selects a method. Here it finds the judges independent and fits a Dawid-Skene model by
# expectation maximisation: the accuracy of each judge and the truth of each response explain each other. No label is
# used.

# %%
import numpy as np

from forge_weaver import Auto
from forge_weaver.calibration import auc

aggregator = Auto().fit(table)
print(aggregator.report)
probability = aggregator.predict_proba(table)

# %% [markdown]
# We happen to know the truth here, so we can check what it found. Only this cell uses it. AUC is the probability that a
# right response scores above a wrong one.

# %%
truth = np.array([[text == p.prompt[-2::-1] for text in p.responses] for p in problems], dtype=float)
areas = {name: auc(table.scores[:, :, i], truth) for i, name in enumerate(table.verifiers)}
areas["mean of verdicts"] = auc(table.scores.mean(2), truth)
areas["weaver"] = auc(probability, truth)
for name, area in areas.items():
    print(f"{name:18} {area:.3f}")

# %%
import matplotlib.pyplot as plt

bins = np.linspace(0, 1, 6)
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
left.barh(list(areas), list(areas.values()))
left.set(xlim=(0.5, 1), title="AUC")
for low, high in pairwise(bins):
    inside = (probability >= low) & (probability <= high)
    if inside.any():
        right.plot(probability[inside].mean(), truth[inside].mean(), "o", color="tab:blue")
right.plot([0, 1], [0, 1], color="grey", linewidth=1)
right.set(xlabel="probability", ylabel="share that is right", title="calibration")
plt.tight_layout()
plt.show()

# %% [markdown]
# ## The reward
#
# `Ensemble.over` makes a verifier of the panel and the fitted aggregator. It gives each response its probability. The
# rows have no answers that the reward could see; `accuracy` and the held-out answers only measure how far training has
# come.

# %%
from forge_weaver import Ensemble

result = forge.train(
    warm_up.model,
    dataset=training,
    eval_dataset=held_out,
    prompt_template="{question}>",
    reward={"functions": [Ensemble.over(panel, aggregator)], "accuracy": "ExactMatch"},
    name="weaver",
    run={"overwrite": True},
    eval={"every": 10},
    steps=80,
    batch_size=64,
    n_samples=8,
    max_tokens=6,
    learning_rate=1e-3,
    mini_batches=2,
    seq_len=512,
    max_policy_age=0,
    services={"reward": None},
)

# %%
steps = [row for row in result.metrics if "reward" in row]
evaluated = [(row["step"], row["eval/accuracy"]) for row in result.metrics if "eval/accuracy" in row]
figure, axes = plt.subplots(figsize=(6, 3))
axes.plot([row["step"] for row in steps], [row["reward"] for row in steps], label="reward: probability")
axes.plot([row["step"] for row in steps], [row["accuracy"] for row in steps], label="truly right")
axes.plot(*zip(*evaluated, strict=True), "o-", label="held-out accuracy")
axes.set(xlabel="step", ylim=(0, 1.02))
axes.legend()
plt.show()

# %% [markdown]
# The reward stays close to the share of right responses. If it rose and the accuracy did not, the policy would be
# exploiting a judge: look at both curves whenever a reward is a model. The checks of this page:

# %%
before, after = evaluated[0][1], evaluated[-1][1]
print(f"held-out accuracy {before:.2f} -> {after:.2f} without labels in the reward")
assert table.labels is None
assert areas["weaver"] > max(areas[name] for name in ERRORS) + 0.02
assert max(accuracy for _, accuracy in evaluated[-3:]) > before + 0.1
gap = np.mean([row["reward"] - row["accuracy"] for row in steps[-10:]])
assert abs(gap) < 0.2, gap
