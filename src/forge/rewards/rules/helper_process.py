"""The loop of a helper process: for each line of its input, a forked child answers with the program's `are_equal`.

The kernel kills a child that uses too much time or memory. This module imports nothing of forge, so that the process
starts fast.
"""

import json
import os
import resource
import runpy
import signal
import sys

CPU_SECONDS = 0.75  # CPU time rather than wall time: a verdict must not depend on how busy the machine is
MEMORY_BYTES = 2 << 30


def main(path: str) -> None:
    """Answer questions until standard input ends.

    A question is a line with the JSON list of the arguments of `are_equal`; the answer is a line "equal", "different",
    or "unknown" if the child was killed.

    Args:
        path: of the program, a Python file that defines `are_equal` and `prepare_question`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    program = runpy.run_path(path)

    # A child answers each question, so that the kernel's limits end the child and not this process.
    for line in sys.stdin:
        program["prepare_question"](line)  # before the fork, so that all children share what it loads
        child = os.fork()
        if not child:
            status = 1
            try:
                signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
                status = 0 if program["are_equal"](*json.loads(line)) else 1
            finally:
                os._exit(status)

        status = os.waitpid(child, 0)[1]
        verdict = "different" if status else "equal"
        print("unknown" if os.WIFSIGNALED(status) else verdict, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
