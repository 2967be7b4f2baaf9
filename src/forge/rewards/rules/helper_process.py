"""The loop of a helper process: for every line of its input, a child answers by the program's `are_equal`.

The kernel kills a child that uses too much time or memory. It imports nothing of forge, so that it starts fast.
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
    """Answer questions until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    program = runpy.run_path(path)

    # One child for each question: the kernel ends it at its limits, not this process.
    for line in sys.stdin:
        program["prepare_question"](line)  # loads before the fork
        child = os.fork()
        if not child:
            status = 1
            try:
                signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
                status = 0 if program["are_equal"](*json.loads(line)) else 1
            finally:
                os._exit(status)

        status = os.waitpid(child, 0)[1]
        print("unknown" if os.WIFSIGNALED(status) else "different" if status else "equal", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
