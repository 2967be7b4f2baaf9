"""Runs on several machines: the daemon of each machine, the pool of hosts, and the launchers that start them.

`forge` finds them by entry points: the commands `worker` and `launch`, and machines for a run (`attach`).
"""
