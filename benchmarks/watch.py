"""`forge watch` over a run of many recorded episodes: the time until it shows something, of filters, and its memory.

    python benchmarks/watch.py [--episodes 100000] [--tokens 200]

The folder is made first, from random groups by the code that runs record with. Times are medians over requests to the
server; the first view is also measured in Debian's chromium, where it and selenium are installed.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
from forge.algorithms import load_algorithm
from forge.observability import Run
from forge.observability.metrics import drain
from forge.observability.rollouts import TRAINER
from forge.training import credit
from forge.types import Completion, Episode, Group

WORDS = [
    "the",
    "sum",
    "of",
    "two",
    "odd",
    "numbers",
    "is",
    "even",
    "so",
    "answer",
    "four",
    "seven",
    "apples",
    "because",
]
SAMPLES, GROUPS = 8, 16
REPEAT = 5


def group(index: int, step: int, tokens: int, draw: random.Random) -> Group:
    """Eight random answers to a prompt."""
    episodes = []
    prompt = f"Question {index}: " + " ".join(draw.choices(WORDS, k=tokens // 4))
    for sample in range(SAMPLES):
        length = draw.randint(tokens // 4, tokens)
        completion = Completion(
            text=" ".join(draw.choices(WORDS, k=length)),
            token_ids=[draw.randrange(3, 5000) for _ in range(length)],
            logprobs=[-draw.random() for _ in range(length)],
            prompt_ids=tuple(range(3, 3 + tokens // 4)),
            versions=[max(0, step - 1 - draw.randint(0, 1))] * length,
            finish=draw.choice(["stop", "stop", "length"]),
            sampled_by=f"generator[{sample % 2}]",
        )
        episodes.append(Episode(completion, reward=float(draw.random() < 0.3)))
    return Group(episodes, index, "four", prompt)


def write_run(
    root: Path, name: str, episodes: int, tokens: int = 200, rows: int = 0, settings: dict | None = None
) -> Path:
    """A run's folder with so many episodes, all recorded, and `rows` further steps without any."""
    draw, numbers = random.Random(name), np.random.default_rng(0)
    steps = max(1, episodes // (GROUPS * SAMPLES))
    config = {
        "training": {"steps": steps + rows},
        "async": {"max_policy_age": 1},
        "run": {"name": name},
        **(settings or {}),
    }
    run = Run(name, config, steps=steps + rows, root=str(root))
    run.record("all", 1e12, lambda token: f" {WORDS[token % len(WORDS)]}")
    drain()
    for step in range(1, steps + rows + 1):
        if step <= steps:
            groups = [group((step - 1) * GROUPS + i, step, tokens, draw) for i in range(GROUPS)]
            kept = run.pick(groups)
            batch = credit.make_batch(groups, load_algorithm("grpo"), step - 1, kept)
            size = int(batch.recorded.max()) + 1
            trained = {one: numbers.normal(0, 0.3, size).astype(np.float32) for one in TRAINER}
            dropped = [("too_old", group(10**6 + step, step, tokens, draw))] if step % 10 == 0 else []
            run.log_rollouts(step, kept, batch, trained, dropped)
        reward = 1 - 0.9 ** (step / 20) + draw.gauss(0, 0.03)
        run.log(step, drain(), **{"reward": reward, "reward/std": 0.4, "train/loss": draw.gauss(0, 0.1)})
    run.finish()
    run.close()
    return root / name


def ask(url: str, path: str, **query: str) -> dict:
    with urllib.request.urlopen(f"{url}/api/{path}?{urllib.parse.urlencode(query)}") as answer:
        return json.load(answer)


def timed(url: str, path: str, **query: str) -> float:
    began = time.perf_counter()
    ask(url, path, **query)
    return time.perf_counter() - began


def memory(pid: int) -> dict[str, float]:
    """MB: all that is resident, and without files that are mapped."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: int(lines[name].split()[0]) / 1024 for name in ("VmHWM", "VmRSS", "RssAnon")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=200, help="longest completion")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="forge-watch-"))
    try:
        began = time.perf_counter()
        folder = write_run(root, "many", args.episodes, args.tokens)
        size = (folder / "rollouts.arrow").stat().st_size / 1e6
        print(f"{args.episodes} episodes, {size:.0f} MB, written in {time.perf_counter() - began:.0f} s")
        command = [sys.executable, "-m", "forge", "watch", str(root), "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(ROOT / "src")})
        try:
            url = server.stdout.readline().split()[-1]
            first = sum(timed(url, path, run="many") for path in ("runs", "run", "rows", "rollouts"))
            print(f"first view: {first:.2f} s (four requests, the file not read before)")
            if shutil.which("chromium"):
                print(f"first view in chromium: {in_browser(url):.2f} s until the table has rows")
            for name, query in {
                "reward": {"reward_min": "0.5", "sort": "length", "down": "1"},
                "step and reason": {"step_min": "100", "reason": "dropped"},
                "sorted by reward, page 100": {"sort": "reward", "page": "100"},
            }.items():
                taken = [timed(url, "rollouts", run="many", **query) for _ in range(REPEAT)]
                print(f"filter by {name}: {statistics.median(taken):.2f} s, at most {max(taken):.2f} s")
            taken = [timed(url, "rollouts", run="many", text=f"question {n}7") for n in range(REPEAT)]
            print(
                f"search for a text: {statistics.median(taken):.2f} s, at most {max(taken):.2f} s (each another text)"
            )
            taken = [
                timed(url, "group", run="many", row=str(n)) for n in range(0, args.episodes, args.episodes // REPEAT)
            ]
            print(f"one rollout with its group: {statistics.median(taken):.2f} s")
            print("memory:", ", ".join(f"{name} {mb:.0f} MB" for name, mb in memory(server.pid).items()))
        finally:
            server.terminate()
            server.wait()
    finally:
        shutil.rmtree(root)


def in_browser(url: str) -> float:
    """Seconds from opening the page to the first row of rollouts."""
    from selenium import webdriver
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(word)
    options.binary_location = shutil.which("chromium") or ""
    browser = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        browser.get("about:blank")
        began = time.perf_counter()
        browser.get(f"{url}/#view=rollouts&run=many")
        WebDriverWait(browser, 60, 0.02).until(lambda page: page.find_elements(By.CSS_SELECTOR, "#found tbody tr.link"))
        return time.perf_counter() - began
    finally:
        browser.quit()


if __name__ == "__main__":
    main()
