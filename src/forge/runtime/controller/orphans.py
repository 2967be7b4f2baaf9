"""The end of processes whose controller is lost, on hosts that only their user can stop.

Monarch leaves them running, with the memory of GPUs that they hold. Each process therefore asks at the port on which
the controller's Monarch client listens. A machine on which nothing listens there rejects the connection: the controller
is gone. A machine that does not answer says nothing, as the network may be cut.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
from urllib.parse import urlsplit

from ._monarch import context

log = logging.getLogger(__name__)

PAUSE = 20.0  # seconds between questions, on average
CONNECT_TIMEOUT = 10.0  # seconds
REJECTIONS = 3  # in a row: a firewall that is being reloaded may reject as well, for a moment


def client_address() -> str | None:
    """Return where this process's Monarch client listens on the network, as a URL; None if it does not."""
    url = str(context().actor_instance.actor_id).rpartition("@")[2]
    return url if urlsplit(url).scheme in ("tcp", "tls", "metatls") else None


def end_with(controller: str) -> None:
    """End this process once its controller is gone.

    Nothing happens on a host that cannot reach the controller from the start, as behind a gateway.

    Args:
        controller: its `client_address`.
    """
    threading.Thread(target=_watch, args=(controller,), name="controller", daemon=True).start()


def _watch(controller: str) -> None:
    url = urlsplit(controller)
    if not _listens(url.hostname, url.port):
        log.debug("%s is out of reach: this process does not notice when its controller is lost", controller)
        return
    rejections = 0
    while rejections < REJECTIONS:
        # At random, so that all processes of a run do not ask together.
        time.sleep(PAUSE * random.uniform(0.5, 1.5))
        listens = _listens(url.hostname, url.port)
        rejections = rejections + 1 if listens is False else 0
    log.warning("nothing listens at %s any more: the controller is lost, and this process ends", controller)
    os._exit(1)


def _listens(host: str | None, port: int | None) -> bool | None:
    """Return whether a program listens at a port; None if the machine does not say."""
    try:
        socket.create_connection((host, port), CONNECT_TIMEOUT).close()
    except ConnectionRefusedError:
        return False
    except OSError as error:
        log.debug("%s:%s did not answer: %s", host, port, error)
        return None
    return True
