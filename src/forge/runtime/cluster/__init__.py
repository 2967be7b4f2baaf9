"""Several machines: the daemon on each of them, the pool that the controller takes them from, and what starts both."""

# Environment variables of the processes of a run.
HOST = "FORGE_HOST"  # the address of the host that they are on; not set on the controller's
STORE = "FORGE_STORE"  # the folder of the weight store in the memory of their host

REQUEUE = 75  # exit code of a run that has saved itself and is to be started again: EX_TEMPFAIL of sysexits.h
