"""The program of a confined process: a user's program, or the cells of a session."""

from __future__ import annotations

import ast
import atexit
import builtins
import linecache
import os
import random
import signal
import socket
import sys
import threading
import traceback
import types
from _sitebuiltins import Quitter  # type: ignore[import-not-found]

# The name of a program in its tracebacks.
NAME = "program.py"


def run_program(source: str) -> None:
    """Run a program as __main__ and exit with its code."""
    module = _fresh_main()
    code = _execute(module, source, show=False)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
        code = code or 1
    os._exit(_flush(code))


def run_cells(number: int) -> None:
    """Run cells and reply to each with its mark and a byte: "0" ok, "1" error, "m" out of memory. A cell that raises
    SystemExit ends the process. Cells share a namespace; the value of a final expression is printed.

    Args:
        number: descriptor of a socket. A message is a mark with a file that contains the cell.
    """
    cells = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, number)
    cells.setblocking(True)
    pid = os.getpid()
    module = _fresh_main()
    cells.send(b"+")  # shows the keeper which process replies
    while True:
        mark, files, _, _ = socket.recv_fds(cells, 64, 1)
        if not files:
            os._exit(_flush(_code_without_file(mark)))
        with open(files[0], "rb") as file:
            source = file.read()
        try:
            code = _flush(_execute(module, source.decode("utf-8", "surrogatepass"), show=True, leave=False))
            reply = b"1" if code else b"0"
        except SystemExit as exit_request:
            os._exit(_flush(_exit_code(exit_request)))
        except MemoryError:
            reply = b"m"
            _flush(1)
        if os.getpid() != pid:  # a child of the cell, at its end
            os._exit(_flush(int(reply != b"0")))
        cells.send(mark + reply)


def _fresh_main() -> types.ModuleType:
    """Return an empty __main__, in a process without state inherited from its parent."""
    os.environ.clear()
    os.environ.update(HOME="/tmp", LANG="C.UTF-8", PATH="/usr/bin:/bin")
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in [name for name in sys.modules if name.partition(".")[0] == "inside"]:
        del sys.modules[name]
    builtins.exit = builtins.quit = Quitter("exit", "its end")  # type: ignore[assignment]
    sys.argv = [NAME]
    # The inherited streams belong to other files.
    for number, name, mode, errors in (
        (0, "stdin", "r", "replace"),
        (1, "stdout", "w", "backslashreplace"),
        (2, "stderr", "w", "backslashreplace"),
    ):
        stream = open(number, mode, 1 if number == 2 else -1, "utf-8", errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    return module


def _execute(module: types.ModuleType, source: str, *, show: bool, leave: bool = True) -> int:
    """Execute the source; return the exit code. Without `leave`, SystemExit and MemoryError propagate, the latter after
    its traceback."""
    try:
        tree = ast.parse(source, NAME)
        # As in a notebook, the value of a final expression is shown.
        last = tree.body[-1] if show and tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        linecache.cache[NAME] = (len(source), None, source.splitlines(True), NAME)
        exec(compile(tree, NAME, "exec"), module.__dict__)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), NAME, "eval"), module.__dict__)
            if value is not None:
                print(repr(value))
        return 0
    except SystemExit as exit_request:
        if not leave:
            raise
        return _exit_code(exit_request)
    except BaseException as error:
        # The traceback begins in the program: the frames above are the sandbox's.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != NAME:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        if isinstance(error, MemoryError) and not leave:
            raise
        return 1


def _exit_code(exit_request: SystemExit) -> int:
    if exit_request.code is None or isinstance(exit_request.code, int):
        return (exit_request.code or 0) & 255
    print(exit_request.code, file=sys.stderr)
    return 1


def _flush(code: int) -> int:
    """Flush; the exit code becomes 1 if the output could not be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            code = code or 1
    return code


def _code_without_file(mark: bytes) -> int:
    """Return the exit code: the socket is closed, or the cells have left no descriptor free."""
    if mark:
        print("OSError: too many open files to receive a cell", file=sys.stderr)
    return int(bool(mark))
