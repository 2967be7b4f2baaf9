"""A Monarch worker that a host's daemon starts: the processes of a run on this machine are its children.

It reads its address from standard input, and ends with the daemon.
"""

import sys

from forge.runtime.controller.hosts import serve_host

if __name__ == "__main__":
    serve_host(sys.stdin.readline(), int(sys.argv[1]))
