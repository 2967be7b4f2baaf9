"""Environment variables of a run's processes."""

HOST = "FORGE_HOST"  # the address of their host; not set on the controller's
STORE = "FORGE_STORE"  # the folder of the weight store in the memory of their host
HOSTS = "FORGE_HOSTS"  # of the controller: addresses of other machines, or the path of a file or folder of them

REQUEUE = 75  # exit code of a run that was saved and should be started again: EX_TEMPFAIL of sysexits.h
