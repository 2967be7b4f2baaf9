"""A process whose foreign threads call into Python while it ends has the exit code that it would have without them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

LIBRARY = """
#include <thread>
extern "C" void begin(void (*call)()) {
    std::thread([call]() noexcept { for (;;) try { call(); } catch (...) { } }).detach();
}
"""
PROGRAM = """
import ctypes, sys, threading, time
from forge.runtime.controller.ending import let_threads_wait

let_threads_wait()
called = threading.Event()

@ctypes.CFUNCTYPE(None)
def work():
    called.set()
    time.sleep(0.0001)

ctypes.CDLL(sys.argv[1]).begin(work)
threading.Thread(target=lambda: [time.sleep(0.0001) for _ in iter(int, 1)], daemon=True).start()
called.wait()
time.sleep(0.1)
sys.exit(7)
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_thread_that_wants_the_interpreter_at_its_end_does_not_abort_the_process(tmp_path: Path):
    source, library = tmp_path / "threads.cpp", tmp_path / "threads.so"
    source.write_text(LIBRARY)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source, "-lpthread"], check=True)
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", PROGRAM, library], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (7, "")
