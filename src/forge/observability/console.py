"""The progress line: a live bar on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

# In a log, one line every so many seconds.
LOG_EVERY = 10.0


class Progress:
    """Shows step, reward, accuracy, tokens a second, policy age and the time that is left."""

    def __init__(self, name: str, steps: int, start: int = 0) -> None:
        self.steps = steps
        self._live = sys.stderr.isatty()
        self._bar = tqdm(total=steps, initial=start, desc=name, disable=not self._live, dynamic_ncols=True, unit="step")
        self._started = time.perf_counter()
        self._first: int | None = start or None
        self._logged = 0.0

    def update(self, step: int, row: dict[str, float]) -> None:
        self._first = step if self._first is None else self._first
        shown = {
            "reward": f"{row['reward']:.2f}" if "reward" in row else None,
            "loss": f"{row['train/loss']:.3f}" if "reward" not in row and "train/loss" in row else None,
            "accuracy": f"{row['accuracy']:.2f}" if "accuracy" in row else None,
            "held-out": f"{row['eval/accuracy']:.2f}" if "eval/accuracy" in row else None,
            "tok/s": f"{row['generation/tokens_per_second']:.0f}" if row["generation/tokens_per_second"] else None,
            "age": f"{row['policy_age']:.1f}" if "policy_age" in row else None,
        }
        text = "  ".join(f"{name} {value}" for name, value in shown.items() if value is not None)
        if self._live:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = time.perf_counter()
        if now - self._logged >= LOG_EVERY or step >= self.steps or "eval/accuracy" in row:
            self._logged = now
            done = step - self._first
            left = f"{(now - self._started) / done * (self.steps - step):.0f} s left" if done > 0 else "first step"
            print(f"step {step}/{self.steps}  {text}  {left}", flush=True)

    def say(self, text: str) -> None:
        if self._live:
            self._bar.write(text)
        else:
            print(text, flush=True)

    def close(self) -> None:
        self._bar.close()
