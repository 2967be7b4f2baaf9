"""Write what passes this machine's network cards, without headers, to a file: `python -m tests.cluster.sniff FILE`."""

import socket
import sys

ETH_P_ALL = 3

with open(sys.argv[1], "wb", buffering=1 << 20) as file, socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as card:
    card.bind(("eth0", ETH_P_ALL))
    card.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
    file.flush()
    while True:
        file.write(card.recv(1 << 17)[66:])
