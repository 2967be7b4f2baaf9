"""Runs the program of a confined process: Python source, or a command."""

import ast
import atexit
import builtins
import linecache
import os
import random
import signal
import sys
import threading
import traceback
import types
from _sitebuiltins import Quitter  # type: ignore[import-not-found]

# The name of a program in its tracebacks.
NAME = "program.py"


def run_program(source: str, setup: int) -> None:
    """Run Python source as __main__, and exit this process with its exit code.

    Args:
        setup: the descriptor of `confine_and_run`, which is closed first.
    """
    os.close(setup)
    module = _fresh_main()
    code = _execute_source(module, source)

    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
        code = code or 1

    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # the output could not be written
            code = code or 1

    os._exit(code)


def run_command(command: list[str], env: dict[str, str], setup: int) -> None:
    """Replace this process by a program of the system.

    Args:
        setup: the descriptor of `confine_and_run`, which is closed by that; if the program cannot be executed, the
            reason is written to it.
    """
    # Python ignores these signals, and an executed program would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        os.write(setup, f"{type(error).__name__}: {error}".encode())
        os._exit(127)


def _fresh_main() -> types.ModuleType:
    """Return an empty module __main__, and remove the state that this process has inherited from its parent."""
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

    # The inherited stream objects belong to the parent's files.
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


def _execute_source(module: types.ModuleType, source: str) -> int:
    """Execute Python source in a module, and return the exit code."""
    try:
        tree = ast.parse(source, NAME)
        linecache.cache[NAME] = (len(source), None, source.splitlines(True), NAME)
        exec(compile(tree, NAME, "exec"), module.__dict__)
    except SystemExit as exit_request:
        if exit_request.code is None or isinstance(exit_request.code, int):
            return (exit_request.code or 0) & 255
        print(exit_request.code, file=sys.stderr)
        return 1
    except BaseException as error:
        # Skip the sandbox's frames, so that the traceback starts in the program.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != NAME:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        return 1

    return 0
