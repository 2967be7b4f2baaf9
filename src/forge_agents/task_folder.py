"""Task folders: what is put into one before a run, and how it goes away."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

HOME = ".home"  # in the task folder
NOBODY = 65534  # the user of confined programs


def fill(folder: Path, source: str | Path | None, files: Mapping[str, str], *, new: bool, owned: bool) -> None:
    """Fill a task folder.

    Args:
        source: a folder that is copied, for a new one.
        files: texts by their paths in the folder.
        new: create it first. In a used one, whatever is in the way of a text is replaced by it.
        owned: make all of it the property of the user that confined programs run as.

    Raises:
        ValueError: a path that leads out of it.
    """
    if new:
        if source is None:
            folder.mkdir(parents=True)
        else:
            folder.parent.mkdir(parents=True)
            shutil.copytree(source, folder, symlinks=True)
        (folder / HOME).mkdir(exist_ok=True)
        (folder.parent / "tmp").mkdir()
    else:
        reopen(folder)
    for name, text in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or not path.parts or ".." in path.parts:
            raise ValueError(f"files must be named by paths within the task folder, got {name!r}")
        target = folder / path
        if not new:
            make_way(folder, path)
        elif leads_outside(target.parent, folder):
            raise ValueError(f"the task folder has a link to outside in the path of {name!r}")
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            target.unlink()
        target.write_text(text)
    if owned:
        for place in (folder, folder.parent / "tmp"):
            give(place)


def reopen(folder: Path) -> None:
    """Give a used task folder the rights back that its next program needs: an agent may have locked it."""
    for place in (folder, folder.parent / "tmp"):
        place.chmod(0o755)


def make_way(folder: Path, path: PurePosixPath) -> None:
    """Remove what an agent left in the way of a file: a folder of its name; files and links to outside on its path."""
    for parent in [*reversed(path.parents)][1:]:
        parent_folder = folder / parent
        if not parent_folder.is_dir() or leads_outside(parent_folder, folder):
            parent_folder.unlink(missing_ok=True)
            parent_folder.mkdir()
        parent_folder.chmod(0o755)
    target = folder / path
    if target.is_dir() and not target.is_symlink():
        target.chmod(0o700)
        remove(target)


def leads_outside(place: Path, folder: Path) -> bool:
    """Whether links take a path out of a folder."""
    return not f"{os.path.realpath(place)}/".startswith(f"{os.path.realpath(folder)}/")


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
        unlock(folder)
        shutil.rmtree(folder)
