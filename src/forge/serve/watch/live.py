"""The policy server of a run in training, as the run's folder names it.

The folder may come from another user and name any port. So no key of this user is sent: a run that serves leaves a
separate key in its folder, which only this user can read. And only a server of this user is called, at one path.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path

import aiohttp

from ...observability.runs import SERVED, state
from ...system.bounded_http import bounded
from ...system.files import open_plain
from ...system.web import Json, is_loopback

# Plain HTTP on this machine, and no name that would have to be looked up: the key is sent there.
ADDRESS = re.compile(r"http://([a-z0-9.]{1,40}|\[[0-9a-f:.]{1,40}\]):([0-9]{1,5})/v1")
MAX_FILE = 4096  # characters of the file
Body = dict[str, Json]


class NoModel(ValueError):
    """There is no model to chat with; gives the reason."""


def find_server(run: Path) -> tuple[str, str]:
    """Return the address at which a run serves its policy, and its key.

    Raises:
        NoModel: the run does not serve, or another user may have written the file.
    """
    try:
        file = open_plain(run / SERVED) if state(run) == "running" else None
    except OSError:
        file = None
    if file is None:
        raise NoModel("the policy is not served: the run is not running, or serve.port is not set")
    with file:
        # Another user could write a file with an address of his own, and would receive the prompts.
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise NoModel(f"{run / SERVED} is not a file of this user alone, as a run of this user writes it")
        text = file.read(MAX_FILE)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    # The file may also be that of an older version.
    url = fields.get("url") if isinstance(fields, dict) else None
    key = fields.get("key") if isinstance(fields, dict) else None
    address = ADDRESS.fullmatch(url) if isinstance(url, str) else None
    if address is None or not isinstance(key, str) or not re.fullmatch(r"[\w-]{20,100}", key, re.ASCII):
        raise NoModel(f"{run / SERVED} is not what a run writes: start the run again with this version")
    host = address[1].strip("[]")
    port = int(address[2])
    # The key is sent to that address: another process may have taken the port since the run wrote the file.
    if not is_loopback(host):
        raise NoModel(f"the policy is served at {host}, which is not this machine")
    if listeners(port) != {os.geteuid()}:
        raise NoModel(f"no server of this user alone listens at port {port}")
    return address[0], key


def listeners(port: int) -> set[int]:
    """Return the users whose processes listen at a TCP port of this machine."""
    users = set()
    for table in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            # The kernel's table has the local address, the state (0A is LISTEN) and the user of each socket.
            _, local, _, status, _, _, _, user, *_ = row.split()
            if status == "0A" and local.endswith(f":{port:04X}"):
                users.add(int(user))
    return users


async def ask(run: Path, body: Body, timeout: float) -> Body:
    """Send the body of a request to a run's policy, and return its answer.

    Raises:
        NoModel: as of `find_server`. ValueError: the server rejects the request. aiohttp.ClientError: it fails.
    """
    url, key = find_server(run)
    headers = {"Authorization": f"Bearer {key}", "Accept-Encoding": "identity"}
    limit = aiohttp.ClientTimeout(timeout)
    response_body: Json = None
    async with aiohttp.ClientSession(timeout=limit, headers=headers, auto_decompress=False) as session:
        # A model without a chat template is asked to continue the text.
        for request in (body, as_text(body)) if "messages" in body else (body,):
            path = "chat/completions" if "messages" in request else "completions"
            async with session.post(f"{url}/{path}", json=request, allow_redirects=False) as response:
                chunks = [chunk async for chunk in bounded(response.content.iter_any(), events=False)]
            response_body = json.loads(b"".join(chunks))
            if "no chat template" not in str(response_body.get("error")):
                break
    if "choices" not in response_body:
        raise ValueError(str(response_body.get("error", {}).get("message", response_body)))
    choice = response_body["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    tokens = response_body["usage"]["completion_tokens"]
    return {"text": text, "finish": choice["finish_reason"], "tokens": tokens}


def as_text(body: Body) -> Body:
    """Return the request for a model without a template, which continues the last message."""
    fields = {name: value for name, value in body.items() if name != "messages"}
    return fields | {"prompt": body["messages"][-1]["content"]}
