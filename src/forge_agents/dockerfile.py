"""The part of a Dockerfile that needs no container: working folder, variables and copied files."""

from __future__ import annotations

import glob
import json
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

INNER = ".harbor"  # in the task folder, what is not of the working folder
WITHOUT_EFFECT = ("CMD", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL")  # on commands that others run in a container
# Folders of the system, which a program sees as this machine has them.
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "etc", "dev", "proc", "sys", "tmp", "var", "run", "task")

Unsupported = Callable[[str, str], None]  # gets the word by which something may be ignored, and what it is


@dataclass
class Image:
    """The working folder, variables and files of a Dockerfile.

    workdir: the path of the task folder for programs.
    env: variables.
    base: the image that it begins with.
    copies: sources below the build's folder, with their destination.
    """

    workdir: str = "/app"
    env: dict[str, str] = field(default_factory=dict)
    base: str = ""
    copies: list[tuple[Path, str]] = field(default_factory=list)

    def links(self, readable: tuple[str, ...] = ()) -> dict[str, str]:
        """Paths outside of the task folder that lead into it. ValueError: one of them is of the system, or of what
        programs may read beside it."""
        links = {self.workdir: "."}
        for _, target in self.copies:
            if self._in_workdir(target) is None:
                top = f"/{PurePosixPath(target).parts[1]}"
                path = target.rstrip("/") if self.workdir.startswith(f"{top}/") else top
                links[path] = f"{INNER}/root{path}"
        for path in links:
            if PurePosixPath(path).parts[1:2] in [(), *((name,) for name in SYSTEM)]:
                raise ValueError(
                    f"its path {path} is of the system: without a container, paths such as /app are possible"
                )
            if self.workdir.startswith(f"{path}/"):
                raise ValueError(f"it copies to {path}, which holds the working folder {self.workdir}: copy into that")
            for other in readable:
                if f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/"):
                    raise ValueError(f"its path {path} hides {other}, which episode.agent.readable names")
        return links

    def stage(self, folder: Path) -> None:
        """Copy the files to where they are in a task folder."""
        for source, target in self.copies:
            inner = self._in_workdir(target)
            destination = folder / (inner if inner is not None else f"{INNER}/root{target}")
            if source.is_dir():
                shutil.copytree(source, destination, symlinks=True, dirs_exist_ok=True)
                continue
            if target.endswith("/") or destination.is_dir():
                destination = destination / source.name
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, destination)

    def _in_workdir(self, target: str) -> str | None:
        path = target.rstrip("/") or "/"
        if path == self.workdir:
            return "."
        return path[len(self.workdir) + 1 :] if path.startswith(f"{self.workdir}/") else None


def read_dockerfile(text: str, folder: Path, unsupported: Unsupported) -> Image:
    """Read a Dockerfile.

    Args:
        folder: what it is built from.
        unsupported: is called for each instruction that needs a container.

    Raises:
        ValueError: it is malformed, or copies what is not there.
    """
    image = Image()
    workdir = PurePosixPath("/")
    for line in _lines(text):
        word, _, rest = line.partition(" ")
        instruction = word.upper()
        rest = rest.strip()
        if "<<" in rest:
            unsupported("heredoc", f"{instruction} with a heredoc")
        elif instruction == "FROM":
            if image.base:
                unsupported("stages", "several stages")
            image.base = rest.split()[0] if rest else ""
        elif instruction == "WORKDIR":
            workdir = workdir / rest
            image.workdir = os.path.normpath(workdir)
        elif instruction == "ENV":
            image.env |= _variables(rest)
        elif instruction in ("COPY", "ADD"):
            if "--from=" in rest:
                unsupported("stages", "several stages")
                continue
            image.copies += _copies(rest, folder, workdir if workdir != PurePosixPath("/") else PurePosixPath("/app"))
        elif instruction not in WITHOUT_EFFECT and not (instruction == "USER" and rest in ("root", "0")):
            unsupported(instruction, f"{instruction} {rest[:40]}".strip())
    return image


def _lines(text: str) -> list[str]:
    """The instructions, each on one line."""
    lines = [line.strip() for line in text.splitlines() if not line.lstrip().startswith("#")]
    return [" ".join(line.split()) for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line.strip()]


def _variables(rest: str) -> dict[str, str]:
    words = shlex.split(rest)
    if words and "=" in words[0]:
        variables = dict(word.partition("=")[::2] for word in words)
    else:  # the old form, ENV NAME TEXT
        name, _, value = rest.partition(" ")
        variables = {name: value.strip()}
    if any("$" in value for value in variables.values()):
        raise ValueError(f"ENV {rest[:60]} refers to other variables: write their values")
    return variables


def _copies(rest: str, folder: Path, workdir: PurePosixPath) -> list[tuple[Path, str]]:
    words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    options = [word for word in words if word.startswith("--")]
    for option in options:
        # Owners and modes have no meaning where one user runs all.
        if not option.startswith(("--chown=", "--chmod=", "--link")):
            raise ValueError(f"COPY {option} needs a container")
    *sources, target = words[len(options) :]
    slash = "/" if target.endswith(("/", ".")) or len(sources) > 1 else ""
    target = os.path.normpath(workdir / target) + slash
    copies = []
    for source in sources:
        if "://" in source or ".." in PurePosixPath(source).parts:
            raise ValueError(f"COPY {source} is not a path below environment")
        paths = sorted(glob.glob(source.lstrip("/") or ".", root_dir=folder))
        if not paths:
            raise ValueError(f"COPY {source} is not in environment")
        for path in paths:
            # A link could lead to any file of this machine.
            if not Path(os.path.realpath(folder / path)).is_relative_to(os.path.realpath(folder)):
                raise ValueError(f"COPY {source} leads out of environment")
            copies.append((folder / path, target))
    return copies
