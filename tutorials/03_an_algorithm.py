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
# # 3. Writing an algorithm
#
# An algorithm is a loss, and the advantages that weight it. This page writes one as a function, proves that it is what
# we think it is, and then writes another as a class. About a minute on a CPU.
#
# ## The task
#
# Spell three letters backwards, from random weights, with a reward for every right letter.

# %%
import itertools
import random

import torch

import forge

words = ["".join(letters) for letters in itertools.product("abcd", repeat=3)]
random.Random(0).shuffle(words)
settings = dict(
    from_scratch={"alphabet": "abcd>", "hidden_size": 64, "layers": 2, "max_positions": 16},
    dataset=[{"question": word, "answer": word[::-1]} for word in words],
    prompt_template="{question}>",
    reward="CharacterMatch",
    run={"overwrite": True},
    batch_size=32,
    n_samples=8,
    max_tokens=5,
    learning_rate=2e-3,
    seq_len=512,
    max_policy_age=0,
    services={"reward": None},
)

# %% [markdown]
# ## A function
#
# A loss is a function of named tensors. It takes the ones that it names; each has the shape `[tokens]`: the trained
# tokens of a micro-batch. `weights` are each token's share of the loss, and add up to 1 over the batch. The smallest
# policy gradient is
#
# $$L = -\sum_t w_t \, A_t \log \pi(y_t)$$


# %%
def policy_gradient(logprobs, advantages, weights):
    return -(weights * advantages * logprobs).sum()


mine = forge.train(None, algorithm=policy_gradient, name="algorithm-mine", steps=12, **settings)
grpo = forge.train(None, algorithm="grpo", name="algorithm-grpo", steps=12, **settings)

# %% [markdown]
# ## Is it right?
#
# With one update per step and no staleness, the ratio of GRPO's loss is 1 everywhere, nothing is clipped, and
# $\nabla \rho A = \rho A \nabla \log \pi = A \nabla \log \pi$. So our loss must have GRPO's gradient, and both runs
# must see the same rewards up to rounding. Seeds decide everything else: data, sampling and initial weights.


# %%
def rewards(result):
    return [row["reward"] for row in result.metrics if "reward" in row]


for step, pair in enumerate(zip(rewards(mine), rewards(grpo), strict=True), 1):
    if step % 3 == 0:
        print(step, *(f"{reward:.4f}" for reward in pair))

# %% [markdown]
# The value of a gradient deserves an independent check: finite differences in float64.

# %%
torch.manual_seed(0)
logprobs = torch.randn(6, dtype=torch.float64).requires_grad_()
advantages, weights = torch.randn(6, dtype=torch.float64), torch.full((6,), 1 / 6, dtype=torch.float64)
gradient_is_right = torch.autograd.gradcheck(lambda x: policy_gradient(x, advantages, weights), (logprobs,))
print(gradient_is_right)

# %% [markdown]
# ## Tokens and text
#
# A loss may also name `tokens`, `positions` (in the answer, from 0), `sequences` and `groups`; and spans of text, which
# it declares as regular expressions. This one counts the first two letters of an answer double, and a doubled letter
# anywhere not at all. It has a gradient that can be checked by hand.


# %%
def first_letters(logprobs, advantages, weights, positions, doubled):
    share = (1 + (positions < 2).to(logprobs.dtype)) * (1 - doubled)
    return -(weights * share * advantages * logprobs).sum()


first_letters.spans = {"doubled": r"((.)\2)"}

position, doubled = torch.arange(6), torch.tensor([0.0, 0, 0, 1, 1, 0], dtype=torch.float64)
logprobs = logprobs.detach().requires_grad_()
first_letters(logprobs, advantages, weights, position, doubled).backward()
expected = -weights * advantages * torch.tensor([2.0, 2, 1, 0, 0, 1], dtype=torch.float64)
shaped_is_right = torch.allclose(logprobs.grad, expected)
shaped = forge.train(None, algorithm=first_letters, name="algorithm-letters", steps=4, **settings)
print(shaped_is_right, rewards(shaped))

# %% [markdown]
# Advantages, too, may be of single tokens: `advantages` of a class returns a number for an episode, or a list with one
# for each of its trained tokens. It may name `episodes`, which have tokens and text.

# %%
from forge.algorithms import Algorithm


class Fading(Algorithm):
    def advantages(self, rewards, episodes):
        faded = [[0.7**i for i in range(sum(episode.mask))] for group in episodes for episode in group]
        flat = [reward - 0.5 for group in rewards for reward in group]
        numbers = iter([[reward * share for share in shares] for reward, shares in zip(flat, faded, strict=True)])
        return [[next(numbers) for _ in group] for group in rewards]


fading = forge.train(None, algorithm=Fading(), name="algorithm-fading", steps=4, **settings)
print(rewards(fading))

# %% [markdown]
# ## A class
#
# An algorithm with settings of its own is a dataclass. `ratio` is $\pi / \pi_{old}$ of every token. This one bounds the
# update smoothly, where PPO clips it: tanh is flat far from 1. It makes a difference when a batch is used for several
# updates, so this run makes four per step. KL, entropy bonus, importance correction and masks come from the base class.

# %%
from dataclasses import dataclass


@dataclass(eq=False)
class TanhGRPO(Algorithm):
    scale: float = 3.0

    def token_loss(self, ratio, logprobs, advantages):
        return -torch.tanh(self.scale * (ratio - 1)) / self.scale * advantages

    def clipped(self, ratio, advantages):
        return self.scale * (ratio - 1).abs() > 1


several = {**settings, "mini_batches": 4}
tanh = forge.train(None, algorithm=TanhGRPO(scale=3.0), name="algorithm-tanh", steps=40, **several)
clip = forge.train(None, algorithm="grpo", name="algorithm-clip", steps=40, **several)

# %%
import matplotlib.pyplot as plt

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
for result, label in ((tanh, "tanh"), (clip, "grpo, clipped")):
    left.plot(rewards(result), label=label)
    right.plot([row["train/clip_fraction"] for row in result.metrics if "reward" in row], label=label)
left.set(xlabel="step", title="reward")
right.set(xlabel="step", title="share of tokens whose update was bounded")
left.legend()
plt.show()

# %% [markdown]
# From a configuration file the same class is `algorithm: my_module:TanhGRPO`, with `grpo: {scale: 3.0}`. The checks of
# this page:

# %%
apart = max(abs(a - b) for a, b in zip(rewards(mine), rewards(grpo), strict=True))
print(f"rewards of the two losses differ by at most {apart:.4f}")
assert apart < 0.02, apart
assert len(set(rewards(grpo))) > 6  # they moved, so that agreement means something
assert gradient_is_right
assert shaped_is_right
for result in (tanh, clip):
    assert sum(rewards(result)[-5:]) > sum(rewards(result)[:5]) + 0.75, rewards(result)
assert max(row.get("train/clip_fraction", 0) for row in tanh.metrics) > 0
