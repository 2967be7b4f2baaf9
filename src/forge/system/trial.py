"""Read files from untrusted sources in a child process, with limits on CPU time and memory, and without waiting."""

import importlib
import os
import resource
import signal
import subprocess
import sys

from .files import escape_controls

CPU_SECONDS = 60
MEMORY = 4 << 30  # bytes


def try_in_child(function: str, *arguments: str, subject: str, seconds: int = CPU_SECONDS) -> str:
    """Call a function in a child process, to see whether it fails or hangs, and return its output.

    Args:
        function: `package.module:function`.
        arguments: its arguments.
        seconds: CPU time that it may use.
        subject: what the arguments are, which starts the error, e.g. "the tokenizer".

    Raises:
        ValueError: the function raised, crashed, exceeded its time or MEMORY, or opened a pipe or device.

    Example:
        >>> try_in_child("builtins:print", "[1, 2]", subject="the text")
        '[1, 2]\\n'
    """
    command = [sys.executable, "-P", "-m", __name__, str(seconds), function, *arguments]
    trial = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if trial.returncode == 0:
        return trial.stdout.decode(errors="replace")

    lines = trial.stderr.decode(errors="replace").splitlines()
    reason = next((line for line in reversed(lines) if "Error" in line or "Exception" in line), "its library failed")
    if trial.returncode < 0:  # an abort of the library, or a limit
        reason = f"its library ended with {signal.Signals(-trial.returncode).name}"
        if -trial.returncode in (signal.SIGXCPU, signal.SIGKILL):
            reason = f"it takes more than {seconds} s of CPU time"
    reason = reason.removeprefix("ValueError: ").replace("MemoryError", f"it takes more than {MEMORY >> 30} GiB")
    raise ValueError(f"{subject} cannot be used: {escape_controls(reason[:300])}")


def reject_special(event: str, arguments: tuple[object, ...]) -> None:
    """Raise OSError if a pipe or a device is opened, which may never end; a hook for `sys.addaudithook`."""
    path = arguments[0] if event == "open" else None
    is_path = isinstance(path, str) and os.path.exists(path) and path not in (os.devnull, "/dev/urandom")
    if is_path and not os.path.isfile(str(path)) and not os.path.isdir(str(path)):
        raise OSError(f"{path} is a pipe or a device, not a file")


if __name__ == "__main__":
    for name, limit in (("CPU", int(sys.argv[1])), ("DATA", MEMORY), ("CORE", 0)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    sys.addaudithook(reject_special)
    module, _, attribute = sys.argv[2].partition(":")
    getattr(importlib.import_module(module), attribute)(*sys.argv[3:])
