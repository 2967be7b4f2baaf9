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
# # 8. Killing things: fault tolerance and resume
#
# Machines fail in long runs. This page kills the generator and the trainer of a run, then a whole run, and checks that
# every step and every group of completions counted once. About a minute and a half on a CPU, on Linux (it reads
# `/proc`).

# %%
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import forge

rng = random.Random(0)
words = ["".join(rng.choices("abcdef", k=4)) for _ in range(400)]
settings = dict(
    from_scratch={"alphabet": "abcdef>", "hidden_size": 64, "layers": 2, "max_positions": 16},
    dataset=[{"question": word, "answer": word[::-1]} for word in words],
    prompt_template="{question}>",
    reward="CharacterMatch",
    batch_size=8,
    n_samples=4,
    max_tokens=6,
    learning_rate=1e-3,
    seq_len=512,
    max_policy_age=0,
    services={"reward": None},
    metrics={"rollouts": 8},  # record all groups
)

# %% [markdown]
# ## Two killings
#
# A thread of this notebook waits for a step and sends SIGKILL to a process of the run. Components are named after their
# replica: `generator0`, `trainer0`. Checkpoints every five steps let a new trainer load the last one and repeat the
# steps since then.


# %%
def find_processes(name):
    """Descendants of this process with that name."""
    status = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, rest = path.read_text().rpartition(")")
        except OSError:  # it ended meanwhile
            continue
        status[int(path.parent.name)] = (head.partition("(")[2], int(rest.split()[1]))

    def ours(pid):
        return pid == os.getpid() or (pid in status and ours(status[pid][1]))

    return [pid for pid, (found, _) in status.items() if found == name and ours(pid)]


def kill_at(folder, plan, killed):
    for step, name in plan:
        metrics = Path(folder) / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) <= step:
            time.sleep(0.05)
        for pid in find_processes(name):
            os.kill(pid, signal.SIGKILL)
            killed.append((step, name, pid))


killed = []
plan = [(6, "generator0"), (12, "trainer0")]
subprocess.run(["rm", "-rf", "runs/faults"], check=True)
threading.Thread(target=kill_at, args=("runs/faults", plan, killed), daemon=True).start()
result = forge.train(None, name="faults", steps=25, checkpoint={"every": 5}, **settings)
print("killed:", killed)

# %% [markdown]
# The run ended as if nothing had happened. The metrics count what was replaced, and the log above says what was lost
# and when it served again.

# %%
import matplotlib.pyplot as plt

restarts = {
    name: [row["step"] for row in result.metrics if row.get(f"restarts/{name}")] for name in ("generator", "trainer")
}
rows = [row for row in result.metrics if "reward" in row]
figure, (top, bottom) = plt.subplots(2, 1, figsize=(6, 4), sharex=True)
top.plot([row["step"] for row in rows], [row["reward"] for row in rows])
top.set(ylabel="reward")
bottom.bar([row["step"] for row in rows], [row["seconds/step"] for row in rows])
bottom.set(xlabel="step", ylabel="seconds of the step")
for name, found in restarts.items():
    for step in found:
        bottom.text(step + 0.6, rows[int(step) - 1]["seconds/step"], f"{name} replaced", va="top")
plt.show()
print(restarts)

# %% [markdown]
# ## Killing everything
#
# Now the whole run dies: the controller gets SIGKILL, as on a machine that loses power. The same script, started
# again with `resume="auto"`, continues from the last complete checkpoint. We need a process of its own for that.

# %%
script = f"""
import forge, sys
forge.train(None, name=sys.argv[1], steps=16, checkpoint={{"every": 4}}, resume="auto", **{settings!r})
"""
Path("resumable.py").write_text(script)
subprocess.run(["rm", "-rf", "runs/whole", "runs/killed"], check=True)


def start(name):
    return subprocess.Popen([sys.executable, "resumable.py", name], stderr=subprocess.DEVNULL)


assert start("whole").wait() == 0  # without a fault, to compare with

process = start("killed")
metrics = Path("runs/killed/metrics.jsonl")
while not metrics.exists() or len(metrics.read_text().splitlines()) <= 6:
    time.sleep(0.05)
process.kill()
process.wait()
lost = len(metrics.read_text().splitlines()) - 1
print(
    "killed after step",
    lost,
    "with checkpoints",
    sorted(path.name for path in Path("runs/killed/checkpoints").iterdir()),
)

resumed = start("killed").wait()
print("the second start ended with exit code", resumed)

# %% [markdown]
# ## Each step once, each group once, the same bits
#
# In lock-step, a resumed run ends with the same weights as an uninterrupted one, bit for bit (on one machine, in
# float32 on a CPU).


# %%
def history(name):
    return [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]


def weights(name):
    return hashlib.sha256(Path(f"runs/{name}/model/model.safetensors").read_bytes()).hexdigest()


for name in ("whole", "killed"):
    print(name, weights(name)[:16], [int(row["step"]) for row in history(name)])

# %% [markdown]
# The checks of this page:

# %%
assert [name for _, name, _ in killed] == ["generator0", "trainer0"], killed
assert restarts["generator"] and restarts["trainer"], restarts  # both were replaced
assert [row["step"] for row in result.metrics] == list(range(26))  # each step once
trained = [(rollout["step"], rollout["index"]) for rollout in result.rollouts]
assert len(trained) == 25 * 8 and len({index for _, index in trained}) == 25 * 8  # each group once
assert all(len(rollout["rewards"]) == 4 for rollout in result.rollouts)

assert resumed == 0
assert 4 <= lost < 16  # it died in the middle, after a checkpoint
assert [row["step"] for row in history("killed")] == list(range(17))
assert weights("killed") == weights("whole")
