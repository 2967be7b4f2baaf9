"""Write what passes this machine's network cards, without headers, to a file: `python -m tests.cluster.sniff FILE`.

After SIGTERM it writes what has arrived, and ends.
"""

import signal
import socket
import sys
import threading

ETH_P_ALL = 3
SO_RCVBUFFORCE = 33  # without the system's limit, as root

with open(sys.argv[1], "wb", buffering=1 << 20) as file, socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as card:
    card.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 27)
    card.settimeout(0.5)
    card.bind(("eth0", ETH_P_ALL))
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    file.flush()
    while True:
        try:
            file.write(card.recv(1 << 17)[66:])
        except TimeoutError:
            if ended.is_set():
                break
