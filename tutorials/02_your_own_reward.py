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
# # 2. Your own reward and data
#
# A reward is a Python function `f(prompt, response, target) -> float | None`. This page writes one, watches the policy
# exploit it twice, and mends it. About a minute and a half on a CPU.
#
# ## Data from a file
#
# Rows come from a list, a JSON-lines or Parquet file, a `datasets.Dataset` or the hub. Our file has its own column
# names. `prompt_field` and `target_field` say which columns to read, and `prompt_template` makes the prompt.

# %%
import json
import random
from itertools import pairwise
from pathlib import Path

import forge

LETTERS = "abcdefghijkl"
rng = random.Random(0)
starts = ["".join(sorted(rng.sample(LETTERS[:6], 2))) for _ in range(400)]
Path("starts.jsonl").write_text("".join(json.dumps({"start": start, "length": "4"}) + "\n" for start in starts))
print(Path("starts.jsonl").read_text()[:70])

# %% [markdown]
# ## A reward
#
# The policy sees two letters, such as `be`. Its response should be letters in ascending order. The first idea: the
# share of neighbouring letters that ascend. A response without neighbours cannot be judged by that, so we return
# `None`. An unscored response is left out and counted. It is never treated as 0.


# %%
def ascending(prompt, response, target):
    pairs = list(pairwise(response))
    if not pairs:
        return None
    return sum(first < second for first, second in pairs) / len(pairs)


# %% [markdown]
# Test a reward before it trains anything: on good, bad and empty responses.

# %%
assert ascending("be>", "bdfh", "4") == 1.0
assert ascending("be>", "hfdb", "4") == 0.0
assert ascending("be>", "", "4") is None

settings = dict(
    from_scratch={"alphabet": LETTERS + ">", "hidden_size": 64, "layers": 2, "max_positions": 24},
    dataset={
        "path": "starts.jsonl",
        "prompt_field": "start",
        "target_field": "length",
        "prompt_template": "{question}>",
    },
    batch_size=32,
    n_samples=8,
    max_tokens=10,
    learning_rate=4e-3,
    mini_batches=2,
    seq_len=512,
    max_policy_age=0,
    services={"reward": None},
    metrics={"rollouts": 32},  # record all groups
)
first = forge.train(None, reward=ascending, name="reward-1", run={"overwrite": True}, steps=25, **settings)

# %% [markdown]
# ## Look at the rollouts, not only at the reward
#
# The reward rises to almost 1. Is that what we wanted?


# %%
def means(result, key):
    values = [row.get(key, 0.0) for row in result.metrics if "reward" in row]
    return sum(values[:5]) / 5, sum(values[-5:]) / 5


print("reward", means(first, "reward"))
print("completion length", means(first, "generation/completion_length"))
for rollout in first.rollouts[:2] + first.rollouts[-4:]:
    print(rollout["step"], rollout["prompt"], "->", repr(rollout["response"]))

# %% [markdown]
# The policy found the cheapest way: responses got short. Two letters ascend easily, and nothing asked for four. This is
# reward hacking: the reward rises, the task is not solved. The data has the length that we want as target, so the
# second reward asks for it. It also gives partial credit, because a group in which all rewards are equal has no signal.


# %%
def four_ascending(prompt, response, target):
    length = int(target)
    right = sum(first < second for first, second in pairwise(response))
    return min(right, length - 1) / (length - 1) - 0.3 * abs(len(response) - length)


assert four_ascending("be>", "bdfh", "4") == 1.0
assert four_ascending("be>", "bd", "4") < four_ascending("be>", "bdf", "4") < 1.0
assert four_ascending("be>", "abcdefgh", "4") < 1.0

second = forge.train(None, reward=four_ascending, name="reward-2", run={"overwrite": True}, steps=60, **settings)

# %% [markdown]
# ## Look again, at the tokens
#
# The text is right now. But the run ends with an alert: completions were cut at `max_tokens`. `rollouts.arrow` has the
# tokens.

# %%
import pyarrow as pa

with pa.OSFile(str(second.folder / "rollouts.arrow")) as file:
    rows = pa.ipc.open_stream(file).read_all().to_pylist()
for row in rows[-3:]:
    print(row["reward"], repr(row["response"]), "".join(row["texts"]))

# %% [markdown]
# The response is padded with special tokens, which leave no text. A reward that reads text cannot see them, and nothing
# in it asks for the end token. A pretrained model hardly ever samples such tokens. Here the remedy is a penalty on the
# length in tokens: with `overlong_buffer=5`, each of the last five tokens before `max_tokens` costs a fifth (the soft
# overlong punishment of DAPO).

# %%
third = forge.train(
    None,
    reward=four_ascending,
    name="reward-3",
    run={"overwrite": True},
    steps=60,
    overlong_buffer=5,
    **settings,
)

# %%
import matplotlib.pyplot as plt

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
runs = ((first, "ascending"), (second, "four ascending"), (third, "and short in tokens"))
for result, label in runs:
    rows = [row for row in result.metrics if "reward" in row]
    left.plot([row["step"] for row in rows], [row["reward"] for row in rows], label=label)
    right.plot([row["step"] for row in rows], [row["generation/completion_length"] for row in rows], label=label)
left.set(xlabel="step", title="reward")
right.set(xlabel="step", title="tokens of a response (with the end token)")
left.legend()
plt.show()

# %%
for rollout in third.rollouts[-4:]:
    print(rollout["step"], rollout["prompt"], "->", repr(rollout["response"]))

# %% [markdown]
# The policy answers the same to every prompt, and not always with letters. Nothing in the reward mentions the prompt or
# the alphabet: that would be the next repair. Read rollouts after every change of a reward.
#
# Several rewards add up: `reward=[four_ascending, other]`. Rewards with settings, reward models, judges and sandboxed
# code are in the page about verifiers. The checks of this page:


# %%
def solved(result, last=128):
    responses = [rollout["response"] for rollout in result.rollouts[-last:]]
    return sum(len(text) == 4 and list(text) == sorted(set(text)) for text in responses) / len(responses)


for result, label in runs:
    start, end = means(result, "reward")
    tokens = means(result, "generation/completion_length")[1]
    print(f"{label}: reward {start:.2f} -> {end:.2f}, solved {solved(result):.2f}, {tokens:.1f} tokens")
    assert end > start + 0.2
assert any(row.get("episode/unscored", 0) > 0 for row in first.metrics)  # None was counted
assert solved(second) > solved(first) + 0.3
assert solved(third) > solved(first) + 0.3
assert means(second, "generation/completion_length")[1] > 8  # padded
assert means(third, "generation/completion_length")[1] < 7  # it ends
