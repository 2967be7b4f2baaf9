"""Task folders: what is put into one before a run, and how it goes away."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

HOME = ".home"  # in the task folder
NOBODY = 65534  # the user of confined programs


def fill(folder: Path, source: str | Path | None, files: Mapping[str, str], *, new: bool, owned: bool) -> None:
    """Fill a task folder. What an agent left in the way of a text, a link, a folder or a locked one, is replaced by it.

    Args:
        source: a folder that is copied, for a new one.
        files: texts by their paths in the folder.
        new: create it first.
        owned: make all of it the property of the user that confined programs run as.

    Raises:
        ValueError: a path that leads out of it.
    """
    paths = {PurePosixPath(name): text for name, text in files.items()}
    for path in paths:
        if path.is_absolute() or not path.parts or ".." in path.parts:
            raise ValueError(f"files must be named by paths within the task folder, got {str(path)!r}")
    places = (folder, folder.parent / "tmp")
    if new:
        folder.parent.mkdir(parents=True)
        if source is None:
            folder.mkdir()
        else:
            shutil.copytree(source, folder, symlinks=True)
        (folder / HOME).mkdir(exist_ok=True)
        places[1].mkdir()
    for place in places:
        place.chmod(0o755)
    for path, text in paths.items():
        for parent in [*reversed(path.parents)][1:]:
            inner = folder / parent
            if inner.is_symlink() or not inner.is_dir():
                inner.unlink(missing_ok=True)
                inner.mkdir()
            inner.chmod(0o755)
        target = folder / path
        if target.is_dir() and not target.is_symlink():
            remove(target)
        target.unlink(missing_ok=True)
        target.write_text(text)
    if owned:
        for place in places:
            give(place)


def give(folder: Path) -> None:
    """Make all of a folder the property of the user that programs run as."""
    os.chown(folder, NOBODY, NOBODY)
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            os.chown(os.path.join(parent, name), NOBODY, NOBODY, follow_symlinks=False)


def unlock(folder: Path) -> None:
    """Make all folders below one such that this user can remove them: an agent may have taken its rights away."""
    for parent, folders, _ in os.walk(folder):
        for name in folders:
            path = os.path.join(parent, name)
            if stat.S_ISDIR(os.lstat(path).st_mode):
                os.chmod(path, 0o700)


def remove(folder: Path) -> None:
    """Remove a folder if it exists, whatever rights its parts have."""
    if folder.exists():
        folder.chmod(0o700)
        unlock(folder)
        shutil.rmtree(folder)
