"""The server of a run that is in training, if its folder tells the truth.

A folder may come from anybody and name any port. So no key of the user is sent there: a run that serves leaves a key of
its own in its folder, which only this user can read. And only a server of this user is asked, at the one path.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import aiohttp

from ...observability.runs import SERVED, state
from ...system.bounded_http import bounded
from ...system.files import open_plain
from ...system.web import is_loopback

ADDRESS = re.compile(r"http://([a-z0-9.]{1,40}|\[[0-9a-f:.]{1,40}\]):([0-9]{1,5})/v1")
LONGEST = 4096  # characters of the file


class NoModel(ValueError):
    """There is nothing to ask; says why."""


def served(run: Path) -> tuple[str, str]:
    """The address at which a run serves its policy, and its key.

    Raises:
        NoModel: it does not run or serve, or another user may have written so.
    """
    try:
        file = open_plain(run / SERVED) if state(run) == "running" else None
    except OSError:
        file = None
    if file is None:
        raise NoModel("the policy is not served: the run is not running, or serve.port is not set")
    with file:
        about = os.fstat(file.fileno())
        if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
            raise NoModel(f"{run / SERVED} is not a file of this user alone, as a run of this user writes it")
        text = file.read(LONGEST)
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        said = None
    url, key = (said.get("url"), said.get("key")) if isinstance(said, dict) else (None, None)
    address = ADDRESS.fullmatch(url) if isinstance(url, str) else None
    if address is None or not isinstance(key, str) or not re.fullmatch(r"[\w-]{20,100}", key, re.ASCII):
        raise NoModel(f"{run / SERVED} is not what a run writes: start the run again with this version")
    host, port = address[1].strip("[]"), int(address[2])
    if not is_loopback(host):
        raise NoModel(f"the policy is served at {host}, which is not this machine")
    if listeners(port) != {os.geteuid()}:
        raise NoModel(f"no server of this user alone listens at port {port}")
    return address[0], key


def listeners(port: int) -> set[int]:
    """The users whose processes listen at a TCP port of this machine."""
    users = set()
    for table in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            _, local, _, status, _, _, _, user, *_ = row.split()
            if status == "0A" and local.endswith(f":{port:04X}"):
                users.add(int(user))
    return users


async def ask(run: Path, asked: dict[str, Any], patience: float) -> dict[str, Any]:
    """The answer of a run's policy to the body of a request.

    Raises:
        NoModel: as of `served`. ValueError: what the server says against it. aiohttp.ClientError: it fails.
    """
    url, key = served(run)
    headers = {"Authorization": f"Bearer {key}", "Accept-Encoding": "identity"}
    limit = aiohttp.ClientTimeout(patience)
    body: Any = None
    async with aiohttp.ClientSession(timeout=limit, headers=headers, auto_decompress=False) as session:
        for request in (asked, as_text(asked)) if "messages" in asked else (asked,):
            what = "chat/completions" if "messages" in request else "completions"
            async with session.post(f"{url}/{what}", json=request, allow_redirects=False) as response:
                chunks = [chunk async for chunk in bounded(response.content.iter_any(), events=False)]
            body = json.loads(b"".join(chunks))
            if "no chat template" not in str(body.get("error")):
                break
    if "choices" not in body:
        raise ValueError(str(body.get("error", {}).get("message", body)))
    choice = body["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return {"text": text, "finish": choice["finish_reason"], "tokens": body["usage"]["completion_tokens"]}


def as_text(asked: dict[str, Any]) -> dict[str, Any]:
    """For a model without a template, which continues text: the last message is what it continues."""
    rest = {name: given for name, given in asked.items() if name != "messages"}
    return rest | {"prompt": asked["messages"][-1]["content"]}
