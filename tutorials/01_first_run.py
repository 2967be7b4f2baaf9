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
# # 1. A first GRPO run
#
# A small model learns to spell words backwards: first by imitation, until it is right about half of the time, then by
# reinforcement learning with a reward. Everything runs on a CPU in about a minute. No model or data is downloaded.
#
# ## Data
#
# A dataset is a list of rows. Each row has a question and an answer. We hold out 128 words; neither stage trains on
# them.

# %%
import random

import forge

rng = random.Random(0)
words = sorted({"".join(rng.choices("abcdefgh", k=rng.randint(3, 4))) for _ in range(1500)})
rng.shuffle(words)
rows = [{"question": word, "answer": word[::-1]} for word in words]
held_out, training = rows[:128], rows[128:]
print(len(training), training[:3])

# %% [markdown]
# ## A starting point: supervised fine-tuning
#
# `model=None` with `from_scratch` makes a model of 100,000 parameters from the seed. With a folder or a hub id as the
# first argument, the rest stays the same. We stop early on purpose: reinforcement learning needs a model that is right
# sometimes, and not always.

# %%
warm_up = forge.sft(
    None,
    from_scratch={"alphabet": "abcdefgh>", "hidden_size": 64, "layers": 2, "max_positions": 16},
    dataset=training,
    prompt_template="{question}>",
    name="first-warm-up",
    run={"overwrite": True},
    eval={"problems": 0, "accuracy": False},
    steps=45,
    batch_size=64,
    learning_rate=3e-3,
    seq_len=512,
)
print(warm_up.model)

# %% [markdown]
# What does it answer? `forge.generate` samples from any model folder.

# %%
examples = held_out[:5]
answers = forge.generate(warm_up.model, [row["question"] + ">" for row in examples], max_tokens=6, temperature=0.0)
for row, answer in zip(examples, answers, strict=True):
    print(row["question"], "->", answer.text, "" if answer.text == row["answer"] else f"(wrong: {row['answer']})")

# %% [markdown]
# ## GRPO
#
# For each prompt the policy samples a group of eight responses. `ExactMatch` rewards a response with 1 if it is the
# answer, with 0 otherwise. The advantage of a response is its reward minus the mean of its group, divided by the
# group's standard deviation. Responses above the mean become more probable.
#
# A generator process samples, a trainer process updates the weights, and new weights go back to the generator after
# every step. `max_policy_age=0` makes the two take turns.

# %%
result = forge.train(
    warm_up.model,
    dataset=training,
    eval_dataset=held_out,
    prompt_template="{question}>",
    reward="ExactMatch",
    algorithm="grpo",
    name="first",
    run={"overwrite": True},
    eval={"every": 10},
    steps=60,
    batch_size=64,
    n_samples=8,
    max_tokens=6,
    learning_rate=1e-3,
    mini_batches=2,
    seq_len=512,
    max_policy_age=0,
    services={"reward": None},  # the reward runs in this process
)

# %% [markdown]
# ## What happened
#
# `result.metrics` has one row per step. The reward is that of sampled responses to training words. Held-out accuracy is
# of greedy answers to words that were never trained.

# %%
import matplotlib.pyplot as plt

steps = [row["step"] for row in result.metrics if "reward" in row]
rewards = [row["reward"] for row in result.metrics if "reward" in row]
evaluated = [(row["step"], row["eval/accuracy"]) for row in result.metrics if "eval/accuracy" in row]

figure, axes = plt.subplots(figsize=(6, 3))
axes.plot(steps, rewards, label="reward of samples", alpha=0.6)
axes.plot(*zip(*evaluated, strict=True), "o-", label="held-out accuracy")
axes.set(xlabel="step", ylim=(0, 1.02))
axes.legend()
plt.show()

# %% [markdown]
# A run leaves its folder behind: the resolved configuration, metrics, recorded rollouts, a report and the model.

# %%
for rollout in result.rollouts[:2] + result.rollouts[-2:]:
    print(rollout["step"], rollout["prompt"], "->", rollout["response"], rollout["rewards"])
print(sorted(path.name for path in result.folder.iterdir()))

# %% [markdown]
# These checks fail if the run did not show what this page says.

# %%
before, after = evaluated[0][1], evaluated[-1][1]
print(f"held-out accuracy {before:.3f} -> {after:.3f}")
assert after > before + 0.1, (before, after)
assert sum(rewards[-10:]) > sum(rewards[:10]) + 1.0, rewards
trained = {rollout["prompt"].rstrip(">") for rollout in result.rollouts}
assert trained and not trained & {row["question"] for row in held_out}

# %% [markdown]
# Next: [your own reward and data](02_your_own_reward.ipynb). The same from the command line is `make quickstart`, and
# `forge watch runs/` shows all runs in a browser.
