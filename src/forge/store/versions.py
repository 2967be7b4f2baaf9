"""A directory of weight versions in shared memory: a version is there whole or not at all.

The trainer writes, generators map. The bytes never pass through a message.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..janitor import Scratch

PREFIX = "forge-weights-"


class VersionStore:
    """Named tensors by version number under one directory. Cheap to make and to pickle: it holds a path.

    Args:
        root: directory made by `create`.
        keep: how many of the newest versions stay.
    """

    def __init__(self, root: str | Path, keep: int = 2) -> None:
        self.root = Path(root)
        self.keep = keep
        self._scratch: Scratch | None = None

    @classmethod
    def create(cls, keep: int = 2) -> VersionStore:
        """Make an empty store that goes with this process, and remove what is left of others whose process is gone."""
        base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
        for stale in base.glob(f"{PREFIX}*"):
            owner = re.match(rf"{PREFIX}(\d+)-", stale.name)
            if owner and not Path(f"/proc/{owner[1]}").exists():
                shutil.rmtree(stale, ignore_errors=True)
        scratch = Scratch(PREFIX, base)
        store = cls(scratch.path, keep)
        store._scratch = scratch
        return store

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "keep": self.keep, "_scratch": None}

    def put(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publish a version, then drop the oldest beyond `keep`.

        Raises:
            FileNotFoundError: the store was removed.
        """
        if not self.root.is_dir():
            raise FileNotFoundError(f"the weight store {self.root} was removed")
        tensors: dict[str, torch.Tensor] = {}
        storages: set[int] = set()
        for name, tensor in named_tensors:
            tensor = tensor.detach().cpu().contiguous()
            storage = tensor.untyped_storage().data_ptr()
            # The file format knows no shared memory: tied tensors are written under each of their names.
            tensors[name] = tensor.clone() if storage in storages else tensor
            storages.add(storage)
        unfinished = self.root / f"v{version}.unfinished"
        save_file(tensors, unfinished)
        os.replace(unfinished, self._path(version))
        for old in self.versions()[: -self.keep]:
            self._path(old).unlink(missing_ok=True)

    def get(self, version: int) -> dict[str, torch.Tensor]:
        """The tensors of a version, by name.

        Raises:
            KeyError: the version is not there; says which are.
        """
        try:
            return load_file(self._path(version))
        except FileNotFoundError:
            raise KeyError(f"weights of version {version} are not in the store; it holds {self.versions()}") from None

    def versions(self) -> list[int]:
        """The published versions, ascending."""
        return sorted(int(path.stem[1:]) for path in self.root.glob("v*.safetensors"))

    def close(self) -> None:
        """Remove the store and everything in it."""
        shutil.rmtree(self.root, ignore_errors=True)
        if self._scratch is not None:
            self._scratch.close()

    def _path(self, version: int) -> Path:
        return self.root / f"v{version}.safetensors"
