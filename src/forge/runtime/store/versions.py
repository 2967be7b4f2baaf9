"""Versioned tensors in shared memory. Publishing a version is atomic, and a published version never changes.

A key is a folder. Each rank that puts a value writes its blocks into a segment, and sends their manifest to the first
rank. That checks that every tensor is complete and publishes one manifest under the version's number. Files are renamed
into place: a process that is killed at any point leaves a whole version or none.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from urllib.parse import quote, unquote
from uuid import uuid4

import torch
from torch import Tensor

from ...system.files import write_atomic
from ...system.scratch import Scratch, sweep_folders
from ..names import STORE as ADDRESS
from .errors import CorruptWeights, IncompleteVersion, MissingVersion, VersionConflict
from .manifest import Manifest
from .protocol import Store
from .segments import Segments, hold_lock
from .transfer import OpenVersion, RankPart, publish_together

# How the names of stores start: `sweep_folders` finds and removes those of killed processes by it.
PREFIX = "forge-weights-"
LOCK_TIMEOUT = 60.0  # seconds to wait for the store's lock, which is held only briefly
SETTLE_TIMEOUT = 5.0  # seconds until a version without its memory counts as lost: another may be replacing it
MAX_IDENTITIES = 4096  # digests that are kept for each key
MAX_NAME = 255  # bytes of a file's name
MAX_HISTORY = 16  # manifests of dropped versions that are kept, to name the tensor in which two versions differ


def memory_folder() -> Path:
    """Return the folder in which stores are created: shared memory, or the one for temporary files without it."""
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())


class VersionStore(Store):
    """Tensors, DTensors and state dicts by key and version, in shared memory of this host.

    The object is only a path: cheap to construct, and to pickle for other processes of the host.

    Args:
        root: the folder of a store that `create` made.
        keep: number of versions of a key that are kept, the newest ones.
    """

    def __init__(self, root: str | Path, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.root = Path(root)
        self.keep = keep
        self.segments = Segments(self.root, self._hold_lock)
        # Names of the segments of each manifest, by the file's path, inode and time.
        self._segments_of: dict[tuple[Path, int, int], set[str]] = {}
        self._scratch: Scratch | None = None

    @classmethod
    def create(cls, keep: int = 2) -> "VersionStore":
        """Return a new, empty store, which is removed when this process ends; also remove stores of dead processes."""
        sweep_folders()
        scratch = Scratch(PREFIX, memory_folder())
        store = cls(scratch.path, keep)
        store._scratch = scratch
        store.prepare()
        return store

    def prepare(self) -> None:
        """Create the folders of a store under its root, which must exist; existing folders stay unchanged."""
        self.segments.free.mkdir(exist_ok=True)
        self.segments.used.mkdir(exist_ok=True)

    @property
    def owned(self) -> bool:
        """Return whether this object created the store, and `close` removes it."""
        return self._scratch is not None

    def is_local(self) -> bool:
        """Return whether the store is on this process's host."""
        return self.segments.used.is_dir()

    def __reduce__(self):
        return VersionStore, (self.root, self.keep)

    def put(
        self,
        key: str,
        value: Tensor | Mapping[str, object],
        version: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        timeout: float = 300.0,
    ) -> int:
        """Publish a tensor or a (nested) state dict; return its version once all processes can read it.

        If the value has DTensors, every rank of the process group must call this, and writes a part: of a block that
        several ranks hold the first one writes it, and rank 0 writes plain tensors. Otherwise this process puts the
        whole value.

        Args:
            version: its number; None is the next one. Equal values may be put again under their number.
            dtype: convert floating-point tensors to it; None keeps their dtypes.
            timeout: seconds to wait for other ranks.

        Raises:
            IncompleteVersion: a rank did not write in time, or a tensor is incomplete; names them. Nothing is
                published.
            VersionConflict: other values were published under the number, or it is below the newest; names the tensor.
            FileNotFoundError: the store was removed.
            NoRoom: not enough shared memory.
        """
        if not self.root.is_dir():
            raise FileNotFoundError(f"the weight store {self.root} was removed")

        part = RankPart.of_value(key, value, version, dtype)

        # The segment stays locked until the version is published or has failed: no other process may reuse it before.
        with ExitStack() as locks:

            def write_manifest() -> Manifest:
                return part.write(*locks.enter_context(self.segments.writing(part.size)))

            if part.ranks.world == 1:
                return self.publish([write_manifest()])
            return publish_together(part, write_manifest, self.publish, timeout)

    def publish(self, parts: list[Manifest]) -> int:
        """Publish the parts of all ranks as one version, and return its number; raises the errors of `put`.

        Each rank has written its segment, and keeps it locked until this returns.
        """
        with self._hold_lock():
            self._key_folder(parts[0].key).mkdir(exist_ok=True)
            return self._publish_parts(parts)

    @contextmanager
    def open(self, key: str, version: int | None = None) -> Iterator[OpenVersion]:
        """Yield an open version, whose memory is not reused within the block.

        Args:
            version: its number; None is the newest one.

        Raises:
            MissingVersion: the key or the version does not exist; names the existing ones.
            CorruptWeights: the version is published, but its memory is gone.
        """
        deadline = time.monotonic() + SETTLE_TIMEOUT
        while True:
            versions = self.versions(key) if version is None else [version]
            if not versions:
                raise self._missing_error(key, None)

            number = versions[-1]
            path = self._key_folder(key) / f"v{number}.json"

            with ExitStack() as locks:
                try:
                    contents = path.read_text(errors="replace")
                    manifest = Manifest.from_json(contents)
                    memory = locks.enter_context(self.segments.reading(manifest.segments))
                except FileNotFoundError:
                    # The manifest or a segment is missing: the version was dropped, is being replaced at this moment by
                    # one whose memory exists, or was lost.
                    if version is not None and not path.exists():
                        raise self._missing_error(key, number) from None
                    if time.monotonic() > deadline:
                        raise CorruptWeights(f"{key} version {number} is published, but its memory is gone") from None
                    time.sleep(0.001)
                    continue

                # If the manifest changed before the segments were locked, they may belong to another version: try
                # again.
                if _read_manifest(path) == contents:
                    yield OpenVersion(manifest, memory)
                    return

    def versions(self, key: str) -> list[int]:
        """Return the published versions of a key, ascending."""
        try:
            names = os.listdir(self._key_folder(key))
        except FileNotFoundError:
            return []
        return sorted(int(name[1:-5]) for name in names if name.startswith("v") and name.endswith(".json"))

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that start with `prefix` and have a version, sorted."""
        names = (unquote(path.name.removeprefix("key-")) for path in self.root.glob("key-*"))
        return sorted(key for key in names if key.startswith(prefix) and self.versions(key))

    def delete(self, key: str) -> None:
        """Remove a key with all of its versions; versions that are open stay readable.

        Raises:
            MissingVersion: the key does not exist.
        """
        if not self.exists(key):
            raise self._missing_error(key, None)
        with self._hold_lock():
            # The folder is renamed first: no reader may see a key that is removed in part.
            shutil.rmtree(self._key_folder(key).rename(self.root / f"deleted-{uuid4().hex}"))
            self.segments.reclaim(self._referenced_segments())

    def wait(self, key: str, min_version: int = 0, *, timeout: float) -> int:
        """Wait until a key has a version of at least `min_version`, and return the newest one.

        Raises:
            TimeoutError: there was none within `timeout` seconds; names the existing ones.
        """
        deadline = time.monotonic() + timeout
        pause = 0.0005
        while not (versions := self.versions(key)) or versions[-1] < min_version:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"waited {timeout:g} s for {key} version {min_version}; the store has {versions or 'none'}"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return versions[-1]

    def manifest(self, key: str, version: int) -> Manifest:
        """Return the manifest of a version that is published, or was dropped recently (one of the last MAX_HISTORY).

        Raises:
            MissingVersion: the version is neither.
        """
        folder = self._key_folder(key)
        # The first path twice: the version may have been published after the first look, and then not been dropped.
        for path in (folder / f"v{version}.json", folder / "dropped" / f"{version}.json", folder / f"v{version}.json"):
            if contents := _read_manifest(path):
                return Manifest.from_json(contents)
        raise self._missing_error(key, version)

    def published(self, key: str) -> list[int]:
        """Return the numbers of a key's versions, recently dropped ones included, ascending."""
        dropped = self._key_folder(key) / "dropped"
        names = os.listdir(dropped) if dropped.is_dir() else []
        return sorted({*self.versions(key), *(int(name.removesuffix(".json")) for name in names)})

    def identities(self, key: str) -> dict[int, set[str]]:
        """Return the digests under which each version of a key was ever published, by its number; also dropped ones."""
        identities: dict[int, set[str]] = {}
        for line in (_read_manifest(self._key_folder(key) / "identities") or "").splitlines():
            version, _, digest = line.partition(" ")
            if digest:  # a line that a full disk has truncated has none
                identities.setdefault(int(version), set()).add(digest)
        return identities

    def adopt(self, key: str, identities: Mapping[int, set[str]]) -> None:
        """Record the digests of weights that an earlier store of this run published, by version number."""
        with self._hold_lock():
            self._key_folder(key).mkdir(exist_ok=True)
            pairs = [(version, digest) for version, digests in identities.items() for digest in sorted(digests)]
            self._record_identities(key, pairs)

    def close(self) -> None:
        """Remove the store with all of its keys and versions."""
        if os.environ.get(ADDRESS) == str(self.root):
            del os.environ[ADDRESS]  # processes that are started later must not open it
        self.segments.forget(everything=True)
        shutil.rmtree(self.root, ignore_errors=True)
        if self._scratch is not None:
            self._scratch.close()

    def _publish_parts(self, parts: list[Manifest]) -> int:
        """Publish the parts of all ranks as one version, and return its number; the caller holds the store's lock."""
        key = parts[0].key
        folder = self._key_folder(key)
        versions = self.versions(key)
        requested_versions = {part.version for part in parts}
        if len(requested_versions) > 1:
            raise IncompleteVersion(
                f"all ranks must put {key} under one version, got {sorted(map(str, requested_versions))}"
            )

        newest = versions[-1] if versions else 0
        requested_version = requested_versions.pop()
        version = newest + 1 if requested_version is None else requested_version

        manifest = Manifest.join(version, parts)
        try:
            manifest.check()
        except ValueError as error:
            raise IncompleteVersion(str(error)) from None

        # A trainer that was restarted puts its last version again: with equal values that is not a conflict.
        if version in versions:
            published = self.manifest(key, version)
            if manifest.digest == published.digest:
                # Segments on other hosts ("name@host") may have been lost with their host: refer to the new ones.
                if any("@" in name for name in published.segments):
                    write_atomic(folder / f"v{version}.json", manifest.to_json())
                return version

            tensor = published.first_difference(manifest)
            conflict = "in another layout" if tensor is None else f"with other values: tensor {tensor!r} was different"
            raise VersionConflict(f"{key} version {version} was already published {conflict}")

        for rank, part in enumerate(parts):
            # A rank that is killed loses the lock on its segment. Segments of other hosts ("name@host") are locked by
            # processes there that wait for this call.
            if not all(self.segments.is_being_written(name) for name in part.segments if "@" not in name):
                raise IncompleteVersion(f"{key} version {version}: rank {rank} was lost before it was published")

        if version < newest:
            raise VersionConflict(f"{key} version {version} is older than the newest, {newest}")

        # The identity is recorded first: every reader of the version must find it.
        self._record_identities(key, [(version, manifest.digest)])
        write_atomic(folder / f"v{version}.json", manifest.to_json())

        # Drop all but the newest `keep` versions, and forget all but the newest dropped ones.
        history = folder / "dropped"
        history.mkdir(exist_ok=True)
        for surplus_version in [*versions, version][: -self.keep]:
            (folder / f"v{surplus_version}.json").rename(history / f"{surplus_version}.json")
        for old in sorted(history.iterdir(), key=lambda path: int(path.stem))[:-MAX_HISTORY]:
            old.unlink()

        self.segments.reclaim(self._referenced_segments())
        return version

    def _referenced_segments(self) -> set[str]:
        """Return the names of the segments of all published versions; segments being written are locked instead."""
        segments: set[str] = set()

        # Only files that are new since the last call are read.
        known_files = self._segments_of
        self._segments_of = {}
        for path in [*self.root.glob("key-*/v*.json"), *self.root.glob("key-*/parts/*/*.json")]:
            status = path.stat()
            file = path, status.st_ino, status.st_mtime_ns
            names = known_files.get(file) or Manifest.from_json(path.read_text(errors="replace")).segments
            self._segments_of[file] = names
            segments |= names
        return segments

    def _record_identities(self, key: str, identities: list[tuple[int, str]]) -> None:
        path = self._key_folder(key) / "identities"
        lines = (_read_manifest(path) or "").splitlines() + [f"{version} {digest}" for version, digest in identities]
        write_atomic(path, "".join(f"{line}\n" for line in lines[-MAX_IDENTITIES:]))

    def _missing_error(self, key: str, version: int | None) -> MissingVersion:
        if not self.exists(key):
            holds = self.keys() or "nothing"
            return MissingVersion(f"the store has no {key!r}; it holds {holds}: await the call that publishes {key!r}")
        return MissingVersion(f"{key} version {version} is not in the store; it holds {self.versions(key)}")

    def _key_folder(self, key: str) -> Path:
        """Return the folder of a key.

        Raises:
            ValueError: the key is too long for the name of a folder, or not Unicode text.
        """
        try:
            name = f"key-{quote(key, safe='')}"
        except UnicodeEncodeError:
            raise ValueError(f"a key must be Unicode text, got {key!r:.80}") from None

        if len(name) > MAX_NAME:
            raise ValueError(
                f"the key {key[:20]!r}... is too long: its folder's name has {len(name)} characters, of at most "
                f"{MAX_NAME} (a byte of a character that is not an ASCII letter or digit counts three)"
            )
        return self.root / name

    def _hold_lock(self) -> AbstractContextManager[None]:
        return hold_lock(self.root / "lock", LOCK_TIMEOUT)


def _read_manifest(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return None
