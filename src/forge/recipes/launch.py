"""Running a recipe: everything is checked before the first process starts, and closed after the last has ended.

An exception of a user's own code is shown by the frames that are the user's.
"""

import gc
import os
import re
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ..config import Arguments, ConfigError, keys_of, to_dict
from ..models.files import try_tokenizer
from ..models.hub import upload_folder, write_card
from ..observability import Run
from ..observability.console import configure_logging, log, report_waiting
from ..observability.folder import RunLock
from ..runtime.controller import ForgeError, forked_processes, run
from ..runtime.controller.errors import RemoteError, RemoteTraceback
from ..runtime.names import REQUEUE, STORE
from ..runtime.store import VersionStore
from ..system.checksums import DamagedFile
from ..system.devices import NoAccelerator
from ..system.files import FULL, fill_standard_files, is_full
from ..system.masking import mask_secrets
from .components import Job
from .hooks import Hooks
from .preemption import Preempted, Preemption, deadline_of
from .prepare import prepare_run
from .resume import find_start, read_config
from .schema import TrainingRecipe
from .signals import end_at_signals

Recipe = Callable[..., Coroutine[Any, Any, None]]
HELP = """usage: {program} --config FILE [--section.key VALUE ...] [--resume RUN|auto]

sections and keys: {sections}
docs/configuration.md describes them; `forge plan FILE` says what a run needs"""


def launch(recipe: Recipe, config_type: type[Any], argv: list[str] | None = None) -> None:
    """Read the configuration from the command line and run `recipe(cfg, job)`. Bad input ends the program with one
    line.

    `--resume runs/x` resumes a run from its newest checkpoint. `--resume auto` resumes the configured run if there is
    something to resume, and otherwise starts it. `job.record.start` is then the number of steps that are done.

    Args:
        config_type: class of the configuration.
        argv: arguments of the command line; None: the program's.
    """
    fill_standard_files()
    end_at_signals()

    # The traceback of an exception that ends the program, with secrets masked.
    sys.excepthook = lambda *fault: sys.stderr.write(mask_secrets("".join(traceback.format_exception(*fault))))

    argv = sys.argv[1:] if argv is None else argv
    if "-h" in argv or "--help" in argv:
        print(HELP.format(program=Path(sys.argv[0]).name, sections=", ".join(keys_of(config_type))))
        return

    with one_line_errors():
        arguments = Arguments.parse(argv)
        run_recipe(recipe, read_config(config_type, arguments), resume=arguments.resume)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn exceptions of a run into SystemExit with one line. A preempted run has the exit code REQUEUE; of an error in
    the user's own code, the traceback there is printed first."""
    try:
        yield
    except Preempted as preempted:
        log.warning("%s", preempted)
        raise SystemExit(REQUEUE) from preempted
    except KeyboardInterrupt:  # before the run has its own handlers, or a second one while it is closed
        raise SystemExit(128 + signal.SIGINT) from None
    except (ConfigError, BadInput, ForgeError) as error:
        if isinstance(error, RemoteError):  # a component ended its process, or raised what cannot be sent
            print_user_frames(error)
        raise SystemExit(mask_secrets(f"error: {error}")) from error
    except Exception as error:
        # Imported here, as checkpoints load all that a trainer needs, which this process is not.
        from ..envs.group import NothingScored
        from ..rewards.reward import BadScore
        from ..training.checkpoint import CheckpointFailed

        # Faults of the machine or of a file need no traceback.
        is_full_disk = isinstance(error, OSError) and error.errno in FULL
        if is_full_disk or isinstance(error, CheckpointFailed | DamagedFile | NoAccelerator):
            raise SystemExit(mask_secrets(f"error: {error}")) from error

        # An error of the user's code shows only the user's frames, and one of the library its whole traceback.
        if not print_user_frames(error) and not isinstance(error, BadScore | NothingScored):
            raise
        lines = [f"error: {summarise_error(error)}", *getattr(error, "__notes__", ())]
        raise SystemExit(mask_secrets("\n".join(lines))) from error


def print_user_frames(error: BaseException) -> bool:
    """Print the traceback frames of an exception that are in the user's own code, and return whether there are any."""
    if frames := user_frames(error):
        print(mask_secrets("\n".join(["Traceback in your code (most recent call last):", *frames])), file=sys.stderr)
    return bool(frames)


class BadInput(ValueError):
    """Error: invalid input of a run, found before any process was started; the message has the fault and the fix in one
    line."""


def run_recipe(recipe: Recipe, cfg: TrainingRecipe, *, resume: str | None = None, hooks: Hooks | None = None) -> Path:
    """Check everything, run a recipe to its end, and return the run's folder.

    Whatever the run has opened or started is closed, also after an error.

    Args:
        recipe: `async def recipe(cfg, job)`.
        resume: "auto" or the run's folder: continue from its last checkpoint; None: start at step 0.
        hooks: a user's functions, which the run calls.

    Raises:
        BadInput: the model, the data or the folder do not allow the run; nothing was started.
        ForgeError, CheckpointFailed, OSError: the run ended with this error.
        Exception: whatever else the recipe raises.
    """
    configure_logging()
    folder = Path(cfg.run.root) / cfg.run.name
    preemption = Preemption(deadline_of(cfg.run.save_before))
    record: Run | None = None

    with ExitStack() as closing:
        if cfg.checkpoint.every and threading.current_thread() is threading.main_thread():
            # Handled from here on until the run has its own handlers: the default action would end the program with
            # another exit code than REQUEUE.
            before = signal.signal(signal.SIGUSR1, lambda *_: preemption.request("SIGUSR1"))
            closing.callback(signal.signal, signal.SIGUSR1, before)

        reports = report_waiting(lambda: "checking model and data" if record is None else record.describe_start())
        closing.callback(reports.set)

        try:
            # Locked before the folder is read: if two launchers start at the same time, only one resumes it.
            closing.callback(RunLock(folder).close)
            start = find_start(cfg, resume)
            if start.finished:
                log.info("%s is finished: it ended after step %d", folder, start.step)
                return folder
            model, held_out, sets, record = prepare_run(cfg, start)
            closing.callback(record.close)
            try_tokenizer(Path(model))
        except (ValueError, OSError, ImportError) as error:
            raise BadInput(str(error)) from error

        # Everything is checked. From here on there are processes and shared memory, which are closed in reverse order.
        closing.enter_context(forked_processes())
        store = VersionStore.create()
        os.environ[STORE] = str(store.root)  # where rewards and environments of a run find it
        closing.callback(store.close)
        # Collections of garbage then skip what the imports made, a million objects: a seventh of this process's time.
        gc.freeze()
        closing.callback(gc.unfreeze)

        try:
            run_preemption = preemption if cfg.checkpoint.every else None
            job = Job(model, held_out, record, store, run_preemption, hooks or Hooks(), sets)
            try:
                run(
                    recipe(cfg, job),
                    cfg.cluster.configured_hosts,
                    cfg.cluster.wait,
                    on_preemption=None if run_preemption is None else run_preemption.request,
                )
            except SystemExit as error:
                # A reward that calls exit(0) must not end the run as if it had finished.
                if error.code:
                    raise
                raise RuntimeError(
                    f"code of the run, such as a reward, raised {error!r}: remove the call of exit"
                ) from error
        except BaseException as error:
            reports.set()
            write_ending(record, error)
            raise

        record.finish()
        exported = Path(record.model)
        if exported.is_dir():
            write_card(exported, recipe.__module__.rpartition(".")[2], to_dict(cfg), record.history)
            if repository := cfg.checkpoint.push_to_hub:
                try:
                    log.info("uploaded %s to %s", exported, upload_folder(exported, repository))
                except Exception as error:  # errors of the hub, its HTTP client and the network have no common class
                    raise ForgeError(
                        f"{exported} could not be uploaded ({' '.join(str(error).split())}); the run is complete. "
                        f"Try again: hf upload {repository} {exported}"
                    ) from error

    return folder


def write_ending(record: Run, error: BaseException) -> None:
    """Record in a run's folder why it ended, and log what is saved. The exception gets a note that names the step."""
    if isinstance(error, Preempted):
        record.fail(str(error), stopped=True)
    elif isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:  # by a signal
        record.fail(signal.Signals(error.code - 128).name, stopped=True)
    elif isinstance(error, Exception):
        step = int(record.history[-1]["step"]) + 1 if record.history else 0
        error.add_note(f"in step {step} of {record.folder}")
        record.fail(summarise_error(error), "".join(traceback.format_exception(error)), full=is_full(error))
    else:
        record.fail(summarise_error(error), stopped=True)

    if not isinstance(error, Preempted):  # its message says it
        log.info("%s", record.describe_saved())


_FRAME = re.compile(r'^  File "(?P<file>[^"\n]+)", line \d+.*\n(?:    .*\n?)*', re.MULTILINE)
# This library and its extensions, Python, and installed packages.
_LIBRARIES = [Path(__file__).parents[2], *(Path(sysconfig.get_path(n)) for n in ("stdlib", "platlib", "purelib"))]


def summarise_error(error: BaseException) -> str:
    """Return the class and the message of an exception in one line.

    >>> summarise_error(KeyError("answer"))
    "KeyError: 'answer'"
    """
    first_line = "".join(traceback.format_exception_only(type(error), error)).partition("\n")[0]
    return " ".join(first_line.split())


def user_frames(error: BaseException) -> list[str]:
    """Return the frames of an exception and its causes that are in the user's own code, as lines of a traceback.

    Frames of this library, of installed packages and of Python are left out. Those of the first cause come first, which
    may be in another process.
    """
    frames: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        traceback_text = (
            cause.text if isinstance(cause, RemoteTraceback) else "".join(traceback.format_tb(cause.__traceback__))
        )
        user_code = [match[0].rstrip("\n") for match in _FRAME.finditer(traceback_text) if _is_users(match["file"])]
        frames = user_code + frames
        cause = cause.__cause__
    return frames


def _is_users(file: str) -> bool:
    """Return whether a file of a frame is the user's own code."""
    # Functions that were sent to another process by value have the file <dynamic-code>.
    is_internal = file.startswith("<") and file != "<dynamic-code>"
    return not is_internal and not any(Path(file).is_relative_to(library) for library in _LIBRARIES)
