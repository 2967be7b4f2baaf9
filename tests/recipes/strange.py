"""The reward of tiny.yaml, which does something odd to its own process at one of its calls."""

import ctypes
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch

from tests.forge_cluster.reward import SharedLetters


def ends() -> None:
    os._exit(3)


def crashes() -> None:
    ctypes.string_at(0)


def changes_its_process() -> None:
    os.chdir("/")
    os.umask(0o777)
    random.seed(1)
    torch.manual_seed(1)
    torch.set_num_threads(2)
    os.environ.clear()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.pthread_sigmask(signal.SIG_BLOCK, {number})


def prints() -> None:
    for _ in range(100):
        sys.stdout.write("x" * 100_000 + "\n")


def keeps_threads() -> None:
    for _ in range(200):
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()


def forks() -> None:
    if os.fork() == 0:
        os._exit(0)


KINDS = [ends, crashes, changes_its_process, prints, keeps_threads, forks]


class Strange(SharedLetters):
    """STRANGE is "kind:path": the first call of the second step does it, once for each path."""

    def __init__(self) -> None:
        kind, _, self.path = os.environ.get("STRANGE", ":").partition(":")
        self.act = next((one for one in KINDS if one.__name__ == kind), None)
        self.left = 2 * 8 * 4

    def __call__(self, prompt: str, response: str, target: str) -> float:
        self.left -= 1
        if self.left <= 0 and self.act is not None and not Path(self.path).exists():
            Path(self.path).touch()
            self.act()
        return super().__call__(prompt, response, target)
