"""The store in the memory of one host of several: versions that are published on another one."""

from __future__ import annotations

from forge.runtime.store import VersionStore
from forge.runtime.store.manifest import Manifest
from forge.system.files import write_atomic


class HostVersions(VersionStore):
    """A `VersionStore` that also keeps segments of versions whose manifest is in another host's store."""

    def keep_part(self, part: Manifest, name: str) -> None:
        """Keep segments of a version that is published on another host: a rank's part on this one, or a copy.

        Args:
            name: of the writer or the copy; the newest `keep` versions of each are kept.
        """
        with self._locked():
            folder = self._folder(part.key) / "parts" / name
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / f"{part.version}.json", part.to_json())
            for old in sorted(folder.glob("*.json"), key=lambda path: int(path.stem))[: -self.keep]:
                old.unlink()
            self.segments.reclaim(self._referenced())

    def part(self, key: str, version: int, name: str) -> Manifest | None:
        """Return the manifest of `keep_part`, if it is still kept."""
        path = self._folder(key) / "parts" / name / f"{version}.json"
        try:
            return Manifest.from_json(path.read_text(errors="replace"))
        except FileNotFoundError:
            return None
