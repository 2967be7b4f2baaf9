"""Write what passes this machine's network cards, without headers, to a file.

    python -m tests.forge_cluster.sniff FILE

After SIGTERM it writes what has arrived, and ends.
"""

import select
import signal
import socket
import sys
import threading

ETH_P_ALL = 3
SO_RCVBUFFORCE = 33  # without the system's limit, as root

with open(sys.argv[1], "wb", buffering=1 << 20) as file, socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as card:
    card.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 27)
    card.bind(("eth0", ETH_P_ALL))
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    file.flush()
    while True:
        ready, _, _ = select.select([card], [], [], 0.0 if ended.is_set() else 0.5)
        if ready:
            file.write(card.recv(1 << 17)[66:])
        elif ended.is_set():
            break
