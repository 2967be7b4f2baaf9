"""The reward of tiny.yaml, which fills a disk at one of its calls: for tests of a disk that is full in mid-run."""

import os
from contextlib import suppress
from pathlib import Path

from tests.forge_cluster.reward import SharedLetters


class Filling(SharedLetters):
    """FILLS names a file and the number of the call at which it takes all that is left; without it nothing happens."""

    def __init__(self) -> None:
        name, _, number = os.environ.get("FILLS", "").rpartition(":")
        self.path, self.left = Path(name), int(number or 0)

    def __call__(self, prompt: str, response: str, target: str) -> float:
        self.left -= 1
        if self.left == 0:
            with suppress(OSError), self.path.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        return super().__call__(prompt, response, target)
