"""Try files from untrusted sources: a child process opens them first, with limits on CPU time and memory."""

import importlib
import resource
import signal
import subprocess
import sys

CPU_SECONDS = 60
MEMORY = 4 << 30  # bytes


def try_in_child(function: str, *arguments: str, subject: str) -> None:
    """Call a function in a child process, to see whether it can be called here.

    Args:
        function: `package.module:function`.
        arguments: its arguments.
        subject: what the arguments are, which starts the error, e.g. "the tokenizer".

    Raises:
        ValueError: the function raised, crashed, or exceeded CPU_SECONDS or MEMORY.

    Example:
        >>> try_in_child("json:loads", "[1, 2]", subject="the text")
    """
    command = [sys.executable, "-P", "-m", __name__, function, *arguments]
    trial = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if trial.returncode == 0:
        return

    lines = trial.stderr.decode(errors="replace").splitlines()
    reason = next((line for line in reversed(lines) if "Error" in line or "Exception" in line), "its library failed")
    if trial.returncode < 0:  # an abort of the library, or a limit
        reason = f"its library ended with {signal.Signals(-trial.returncode).name}"
        if -trial.returncode in (signal.SIGXCPU, signal.SIGKILL):
            reason = f"it takes more than {CPU_SECONDS} s of CPU time"
    raise ValueError(f"{subject} cannot be used: {reason[:300]}")


if __name__ == "__main__":
    for name, limit in (("CPU", CPU_SECONDS), ("DATA", MEMORY), ("CORE", 0)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    module, _, attribute = sys.argv[1].partition(":")
    getattr(importlib.import_module(module), attribute)(*sys.argv[2:])
