"""Names that several packages must agree on: environment variables of a run's processes, and an exit code."""

HOST = "FORGE_HOST"  # in each process: the address of its host; not set on the controller's host
STORE = "FORGE_STORE"  # in each process: the folder of its host's weight store, in shared memory
HOSTS = "FORGE_HOSTS"  # in the controller: addresses of other machines, or the path of a file or folder of them

REQUEUE = 75  # exit code of a run that was saved and should be started again: EX_TEMPFAIL of sysexits.h
