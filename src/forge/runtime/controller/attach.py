"""Attach other machines to a run, before its first component starts."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from ..cluster.credentials import SECRET, Credentials, NoSecret, read_secret
from ..cluster.pool import HOSTS, Pool, expected_addresses
from ..cluster.rooms import NoHostRoom
from ..cluster.wire import split
from ._monarch import enable_tls
from .errors import ForgeError
from .home import private_folder
from .runtime import runtime


async def attach(hosts: str | Sequence[str] | None = None, wait: float = 600.0) -> None:
    """Attach other machines to this run, before its first component starts.

    Components with `hosts` or `with_gpus` are placed on them. Each machine runs `forge worker` with the same
    FORGE_SECRET.

    Args:
        hosts: HOST:PORT of each worker, or the path of a file of them; None reads the variable FORGE_HOSTS, if set.
        wait: seconds that a service without any replica waits for a host.

    Raises:
        NoSecret: FORGE_SECRET is not set. ForgeError: no host could be leased, with the reasons; or it is too late.
    """
    hosts = hosts or os.environ.get(HOSTS)
    if not hosts:
        return
    addresses = await expected_addresses(hosts)
    secret = read_secret()
    if secret is None:
        raise NoSecret(f"hosts are given and {SECRET} is not set: set it to the secret of their workers")
    if not addresses:
        raise ForgeError(f"there are no hosts in {hosts}")
    if runtime().placement.pool is not None or runtime().services:
        raise ForgeError("hosts are attached before the first component is started, and once")
    # Monarch reads the certificates from the environment when it starts to listen.
    address = own_address(addresses)
    credentials = Credentials.make(secret, private_folder(), [address])
    os.environ.update(credentials.environment)
    enable_tls(address)
    pool = Pool(hosts, credentials, wait)
    try:
        await pool.open()
    except NoHostRoom as error:
        await pool.close()
        raise ForgeError(str(error)) from None
    except BaseException:
        await pool.close()
        raise
    runtime().placement.pool = pool


def own_address(hosts: Sequence[str]) -> str:
    """Return the address of this machine from which hosts are reached: the loopback only if all of them are on it.

    Raises:
        ForgeError: none of them has an address.
    """
    addresses = []
    errors = []
    for host in hosts:
        name, port = split(host)
        try:
            family, kind, _, _, destination = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(destination)  # sends nothing, but the kernel chooses an interface
                addresses.append(probe.getsockname()[0])
        except OSError as error:
            errors.append(f"host {host}: {error}")
    if not addresses:
        raise ForgeError(f"no host has an address that this machine reaches: {'; '.join(errors)}")
    return next((address for address in addresses if not address.startswith(("127.", "::1"))), addresses[0])
