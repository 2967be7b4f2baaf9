"""Runs on several machines: the daemon of each machine, the pool of hosts, and the launchers that start them."""

# Environment variables of the processes of a run.
HOST = "FORGE_HOST"  # the address of their host; not set on the controller's
STORE = "FORGE_STORE"  # the folder of the weight store in the memory of their host

REQUEUE = 75  # exit code of a run that was saved and should be started again: EX_TEMPFAIL of sysexits.h
