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
# # 5. An agent that uses a tool
#
# An agent acts in several turns: the policy writes, the environment answers, and the policy writes again. Here the
# policy learns to look up words in a catalogue that it cannot know. It starts as a model that looks a word up half of
# the time and guesses otherwise. The reward is only whether the final answer is right. About a minute on a CPU.
#
# ## A tool
#
# A tool is a Python function with type hints and a docstring. `Toolbox` reads its schema and runs it with a time limit.
# An error becomes a message to the policy and does not end the run.

# %%
import random

import forge
from forge.rewards.rules import ExactMatch
from forge_envs import Toolbox, ToolEnvironment, ToolError

rng = random.Random(0)
words = sorted({"".join(rng.choices("abcdef", k=3)) for _ in range(400)})
rng.shuffle(words)
catalogue = {word: str(rng.randint(1, 9)) for word in words}
held_out, training = words[:40], words[40:]


def find(word: str) -> str:
    """The shelf on which a word stands."""
    if word not in catalogue:
        raise ToolError("unknown")
    return catalogue[word]


def environment():
    return ToolEnvironment(Toolbox(find, max_chars=20), ExactMatch())


def rows(some):
    return [{"question": word, "answer": catalogue[word]} for word in some]


# %% [markdown]
# ## A start: demonstrations
#
# The chat template is a line of jinja: every message of the user and of the tool ends with `>`, every turn of the
# policy with the end token. In half of the demonstrations the tool is used. In the other half the answer is a guess,
# and most guesses are wrong. Shelves of the held-out words appear nowhere.

# %%
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '>' }}{% endfor %}"


def demonstration(word):
    if rng.random() < 0.5:
        return [
            {"role": "user", "content": word},
            {"role": "assistant", "content": f"find({word})"},
            {"role": "tool", "name": "find", "content": catalogue[word]},
            {"role": "assistant", "content": catalogue[word]},
        ]
    return [{"role": "user", "content": word}, {"role": "assistant", "content": str(rng.randint(1, 9))}]


warm_up = forge.sft(
    None,
    from_scratch={"alphabet": "abcdefiknoruw123456789()>: ", "hidden_size": 64, "layers": 2, "max_positions": 64},
    dataset=[{"messages": demonstration(word)} for word in training for _ in range(10)],
    chat_template=TEMPLATE,
    name="agent-warm-up",
    run={"overwrite": True},
    eval={"problems": 0, "accuracy": False},
    steps=150,
    batch_size=64,
    learning_rate=3e-3,
    seq_len=1024,
)

# %% [markdown]
# ## Reinforcement learning in an environment
#
# `environment` takes the place of `reward`. It is anything that makes an environment for an episode. Only the policy's
# own tokens are trained: those of the tool are context. A group of episodes of one task shares its baseline, so using
# the tool pays wherever some episodes of a group guess wrong.

# %%
result = forge.train(
    warm_up.model,
    dataset=rows(training),
    eval_dataset=rows(held_out),
    environment=environment,
    episode={"max_turns": 3, "max_tokens": 60, "template": TEMPLATE},
    name="agent",
    run={"overwrite": True},
    eval={"every": 10},
    steps=30,
    batch_size=16,
    n_samples=8,
    max_tokens=12,  # of one turn
    learning_rate=5e-4,
    seq_len=1024,
    max_policy_age=0,
    metrics={"rollouts": 16},
)

# %%
import matplotlib.pyplot as plt

steps = [row for row in result.metrics if "reward" in row]
evaluated = [(row["step"], row["eval/accuracy"]) for row in result.metrics if "eval/accuracy" in row]
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
left.plot([row["step"] for row in steps], [row["reward"] for row in steps], label="reward", alpha=0.6)
left.plot(*zip(*evaluated, strict=True), "o-", label="held-out accuracy")
left.set(xlabel="step", ylim=(0, 1.02))
left.legend()
right.plot([row["step"] for row in steps], [row["episode/turns"] for row in steps])
right.set(xlabel="step", title="turns of an episode")
plt.show()

# %% [markdown]
# The reward does not mention the tool. Using it pays, so the policy learns to. The recorded tokens of an episode show
# it. Those of the environment are not trained.

# %%
import pyarrow as pa

with pa.OSFile(str(result.folder / "rollouts.arrow")) as file:
    episodes = pa.ipc.open_stream(file).read_all().to_pylist()
last = next(row for row in reversed(episodes) if row["reward"] == 1.0)
print("".join(last["texts"]))
print("trained:", "".join(text for text, own in zip(last["texts"], last["mask"], strict=True) if own))

# %% [markdown]
# The checks of this page:


# %%
def share(step):
    """Of the episodes of a step, those that called the tool."""
    found = ["find(" in "".join(row["texts"]) for row in episodes if row["step"] == step]
    return sum(found) / len(found)


before, after = evaluated[0][1], evaluated[-1][1]
print(f"held-out accuracy {before:.2f} -> {after:.2f}; episodes that call the tool {share(1):.2f} -> {share(30):.2f}")
assert share(30) > share(1) + 0.2
assert steps[-1]["reward"] > steps[0]["reward"] + 0.2
assert after > 0.8
