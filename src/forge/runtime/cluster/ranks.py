"""Process groups over several machines: their store, and gloo's connections, through the daemons.

torch.distributed's own store and gloo accept every peer that reaches their ports, and send in the clear. Here gloo
listens at the loopback of each machine, and connections between machines use the daemons' mutual TLS. NCCL, which has
neither authentication nor encryption, connects by itself: keep its network private.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import threading
from concurrent.futures import Future
from datetime import timedelta

import torch.distributed as dist

from . import HOST
from .credentials import NAME, Credentials
from .peers import from_own_user
from .rendezvous import SCHEME
from .wire import CONNECT_TIMEOUT, Json, connect, pipe, send, split

# gloo's address of a rank: a sockaddr_in at the loopback; each rank listens at 127.0.0.1.
_GLOO = re.compile(rb"\x02\x00(..)\x7f\x00\x00\x01\x00{8}", re.DOTALL)
# The key under which torch writes the address of a rank, and its rank.
_ADDRESS_KEY = re.compile(r"(.*cpu//\d+)/(\d+)")
# Our own key, which torch never writes, by which ranks find those on their machine.
_MACHINE = "machine of "
_stores: list[BoardStore] = []  # C++ does not keep the Python half of a store alive


def board_store(rendezvous: str, timeout: timedelta = dist.default_pg_timeout) -> dist.Store:
    """Open the store of a process group: board://HOST:PORT/NAME names the daemon that stores it, and the group."""
    address, _, name = rendezvous.removeprefix(SCHEME).partition("/")
    store = BoardStore(address, name, timeout)
    _stores.append(store)
    return store


class BoardStore(dist.Store):
    """torch.distributed's store on a daemon's board. It rewrites the addresses of gloo's ranks on other machines.

    Of two ranks gloo has the one with the greater address connect to the other. A rank sees those after it at
    127.0.0.2, which is greater than its own 127.0.0.1: it waits for them. It sees those before it at 0.0.0.0, which is
    smaller, and is this machine: a tunnel to the other machine listens there.
    """

    def __init__(self, address: str, name: str, timeout: timedelta) -> None:
        super().__init__()
        self._address = address
        self._name = name
        self._limit = timeout
        self._credentials = Credentials.of_environment()
        self._host = os.environ[HOST]
        self._ranks: dict[str, int] = {}  # by group of addresses
        self._local = threading.local()  # a connection for each thread: some may wait while others query
        self._tunnels: Tunnels | None = None

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Set a key; addresses of ranks are stored with the machine that they are on."""
        match = _ADDRESS_KEY.fullmatch(key)
        if match:
            self._ranks[match[1]] = int(match[2])
            self._query("set", key=_MACHINE + key, value=self._host)
        self._query("set", key=key, value=value.decode("latin-1"))

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value; an address on another machine becomes that of a tunnel."""
        match = _ADDRESS_KEY.fullmatch(key)
        keys = [key, _MACHINE + key] if match else [key]
        values = self._query("wait", keys=keys, timeout=self._limit.total_seconds())
        value = values[0].encode("latin-1")
        if match is None or values[1] == self._host:
            return value
        address = _GLOO.search(value)
        if address is None:
            raise RuntimeError(f"{key}: gloo describes its ranks in a way that is unknown: is torch another version?")
        # A rank after this one connects to us: any greater address makes gloo wait for it. We connect to one before.
        host = "127.0.0.2"
        port = int.from_bytes(address[1])
        if self._ranks.get(match[1], -1) >= int(match[2]):
            if self._tunnels is None:
                self._tunnels = Tunnels(self._credentials)
            host = "0.0.0.0"
            port = self._tunnels.to(values[1], port)
        replacement = b"\x02\x00" + port.to_bytes(2) + socket.inet_aton(host) + bytes(8)
        return value.replace(address[0], replacement)

    def add(self, key: str, value: int) -> int:
        """Add to a counter, and return its new value."""
        return int(self._query("add", key=key, value=value))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:  # type: ignore[override]
        """Set a key to `desired` if it is `expected`, and return its value."""
        values = {"expected": expected.decode("latin-1"), "value": desired.decode("latin-1")}
        return self._query("compare_set", key=key, **values).encode("latin-1")

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""
        return self._query("check", keys=keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set. DistStoreError: timeout."""
        self._query("wait", keys=keys, timeout=(timeout or self._limit).total_seconds())

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was set."""
        return self._query("delete", key=key)

    def num_keys(self) -> int:
        """Number of keys."""
        return self._query("count")

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default timeout of `get` and `wait`."""
        self._limit = timeout

    @property
    def timeout(self) -> timedelta:
        """The default timeout of `get` and `wait`."""
        return self._limit

    def has_extended_api(self) -> bool:
        """False: append, multi_get and multi_set are unsupported."""
        return False

    def _query(self, action: str, **values: Json) -> Json:
        if not hasattr(self._local, "file"):
            context = self._credentials.context(server=False)
            plain = socket.create_connection(split(self._address), timeout=CONNECT_TIMEOUT)
            connection = context.wrap_socket(plain, server_hostname=NAME)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(None)  # the daemon answers, or is lost with its machine and this group
            self._local.file = connection.makefile("rwb")
            self._local.file.write(b'{"do": "board"}\n' + json.dumps({"board": self._name}).encode() + b"\n")
        file = self._local.file
        file.write(json.dumps({"do": action, **values}).encode() + b"\n")
        file.flush()
        line = file.readline()
        if not line:
            raise ConnectionError(f"host {self._address}, which keeps the rendezvous of these ranks, was lost")
        reply = json.loads(line)
        if "error" in reply:
            raise dist.DistStoreError(f"{reply['error']} (rendezvous at {self._address})")
        return reply["ok"]


class Tunnels:
    """Ports of this machine's loopback that lead to ports of other machines' loopbacks."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._ports: dict[tuple[str, int], int] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="forge-tunnels", daemon=True).start()

    def to(self, host: str, port: int) -> int:
        """Return a port of this machine that leads to `port` of a host."""
        if (host, port) not in self._ports:
            opened: Future[int] = asyncio.run_coroutine_threadsafe(self._open(host, port), self._loop)
            self._ports[host, port] = opened.result(CONNECT_TIMEOUT)
        return self._ports[host, port]

    async def _open(self, host: str, port: int) -> int:
        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                if not from_own_user(writer.get_extra_info("peername"), writer.get_extra_info("sockname")):
                    writer.close()
                    return
                host_reader, host_writer = await connect(host, self._credentials)
            except OSError:
                writer.close()  # gloo names the rank that it cannot reach
                return
            send(host_writer, {"do": "forward", "port": port})
            await asyncio.gather(pipe(reader, host_writer), pipe(host_reader, writer))

        server = await asyncio.start_server(forward, "127.0.0.1", 0)
        return server.sockets[0].getsockname()[1]
