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
# # 4. Asynchrony and staleness, seen
#
# In lock-step, the generator waits while the trainer works, and the trainer waits while the generator works. In
# asynchronous training both work at once. The price is staleness: some tokens were sampled with older weights than
# those that are trained. This page makes staleness visible, token by token. About a minute on a CPU.
#
# The setting is `async.max_policy_age`: how many versions old the weights behind a token may be. At 0 the two take
# turns. The code of the loops is the same.

# %%
import random

import forge

rng = random.Random(0)
words = ["".join(rng.choices("abcdef", k=4)) for _ in range(400)]
settings = dict(
    from_scratch={"alphabet": "abcdef>", "hidden_size": 64, "layers": 2, "max_positions": 96},
    dataset=[{"question": word, "answer": word[::-1]} for word in words],
    prompt_template="{question}>",
    reward="CharacterMatch",
    run={"overwrite": True},
    steps=25,
    batch_size=8,
    n_samples=8,
    max_tokens=80,  # long responses: versions change while they are sampled
    learning_rate=1e-3,
    seq_len=1024,
    services={"reward": None},
    metrics={"rollouts": 8},  # record all groups
)
ages = (0, 1, 4)
runs = {age: forge.train(None, name=f"async-{age}", max_policy_age=age, **settings) for age in ages}

# %% [markdown]
# ## The age of a batch
#
# `policy_age` is the mean age of a step's groups in versions, `policy_age/max` the oldest. A group that would exceed
# the limit is dropped, counted and replaced.

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6, 3))
for age, result in runs.items():
    rows = [row for row in result.metrics if "policy_age/max" in row]
    axes.plot([row["step"] for row in rows], [row["policy_age/max"] for row in rows], label=f"max_policy_age {age}")
axes.set(xlabel="step", ylabel="age of the oldest group")
axes.legend()
plt.show()

# %% [markdown]
# ## The age of each token
#
# The generator receives new weights between two tokens, without losing the sequence. So one response can have tokens
# of several versions. `rollouts.arrow` records the version of every token; versions count the optimiser steps.

# %%
import numpy as np
import pyarrow as pa


def rollouts(result):
    with pa.OSFile(str(result.folder / "rollouts.arrow")) as file:
        rows = pa.ipc.open_stream(file).read_all().to_pylist()
    return [row for row in rows if row["dropped"] is None]


def token_ages(row):
    """[tokens] of the response: versions between sampling and training."""
    versions = np.array(row["versions"])[np.array(row["mask"])]
    return row["step"] - 1 - versions


mixed = max(rollouts(runs[4]), key=lambda row: len(set(token_ages(row))))
print(f"trained in step {mixed['step']}; versions along the response:")
print(*np.array(mixed["versions"])[np.array(mixed["mask"])])

# %%
figure, axes = plt.subplots(1, len(ages), figsize=(9, 2.5), sharey=True)
for axis, (age, result) in zip(axes, runs.items(), strict=True):
    found = np.concatenate([token_ages(row) for row in rollouts(result)])
    axis.hist(found, bins=np.arange(-0.5, 5.5), weights=np.full(len(found), 1 / len(found)))
    axis.set(title=f"max_policy_age {age}", xlabel="age of a token")
axes[0].set(ylabel="share of tokens")
plt.show()

# %% [markdown]
# ## What it does to the loss
#
# The loss corrects for staleness with the ratio $\pi / \pi_{old}$, where $\pi_{old}$ is the policy that sampled the
# token. In lock-step the ratio of the first update is 1 up to rounding. With stale tokens it is not.

# %%
for age, result in runs.items():
    rows = [row for row in result.metrics if "reward" in row]
    deviation = max(row["train/ratio_max_deviation"] for row in rows)
    waited = sum(row["seconds/wait_for_batch"] for row in rows) / sum(row["seconds/step"] for row in rows)
    print(f"max_policy_age {age}: |ratio - 1| up to {deviation:.1e}; trainer waited {waited:.0%} of the time")

# %% [markdown]
# Which setting is faster depends on the machine. On few cores, both sides share the same compute and overlap gains
# little. With a GPU for each side it gains most when generation and training take equally long.
#
# The checks of this page:

# %%
oldest = {age: max(int(token_ages(row).max()) for row in rollouts(result)) for age, result in runs.items()}
deviations = {
    age: max(row["train/ratio_max_deviation"] for row in result.metrics if "reward" in row)
    for age, result in runs.items()
}
print(oldest, deviations)
assert oldest[0] == 0 and deviations[0] < 1e-3
assert 1 <= oldest[1] <= 1 and 1 <= oldest[4] <= 4  # stale tokens were trained, and none older than allowed
assert deviations[4] > 10 * deviations[0]
assert len(set(token_ages(mixed))) > 1  # one response with tokens of several versions
assert all(int(token_ages(row).min()) >= 0 for result in runs.values() for row in rollouts(result))
