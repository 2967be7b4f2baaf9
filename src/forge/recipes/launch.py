"""What surrounds a recipe's loop: everything is checked before the first process starts, and closed after the last."""

from __future__ import annotations

import locale
import logging
import os
import re
import resource
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from ..config.sections import Arguments, ConfigError, to_dict
from ..data.config import DatasetConfig, RowsConfig
from ..models.architecture import longest, rotary_limit
from ..models.files import try_tokenizer
from ..models.find import build_small_model, check_classifier, check_family, resolve_model
from ..models.flops import peak_tflops
from ..models.hub import check_upload, upload, write_card
from ..models.tokenizer import open_tokenizer
from ..observability import Run
from ..observability.console import configure_logging, log
from ..observability.folder import MARK, MONARCH, check_free
from ..observability.lock import RunLock
from ..observability.machine import gpu_name
from ..observability.trackers import check_trackers
from ..runtime.cluster import REQUEUE
from ..runtime.controller import ForgeError, forked_processes, run
from ..runtime.controller.errors import RemoteError
from ..runtime.controller.private import log_to
from ..runtime.store import VersionStore, use
from ..serve.watch.report import write_report
from ..system.checksums import DamagedFile
from ..system.devices import NoAccelerator
from ..system.files import FULL, fill_standard_files, is_full
from ..system.masking import masked
from .components import Job
from .memory import memory_report
from .placement import check_hosts, check_shared
from .preemption import Preempted, Preemption, deadline_of
from .resume import Start, check_origin, find_start, read_config, write_origin
from .schema import EvalConfig
from .signals import end_at_signals, finishing
from .slowness import reported
from .space import check_space
from .user_errors import summary, user_frames

NOUNS = {"prompts": "prompt", "supervised": "row", "preferences": "pair"}  # of data, by its kind
OPEN_FILES = 256  # of one process, at most in small runs
Recipe = Callable[..., Coroutine[Any, Any, None]]


def launch(recipe: Recipe, config_type: type[Any], argv: list[str] | None = None) -> None:
    """Read the configuration of a command line and run `recipe(cfg, job)`. Bad input ends the program with one line.

    `--resume runs/x` resumes a run from its newest checkpoint, `--resume auto` the one that is configured if there is
    something to resume. Afterwards `job.record.start` is the step to start at.
    """
    fill_standard_files()
    end_at_signals()
    sys.excepthook = _print_error
    try:
        arguments = Arguments.parse(sys.argv[1:] if argv is None else argv)
        execute(recipe, read_config(config_type, arguments), resume=arguments.resume)
    except Preempted as preempted:
        log.warning("%s", preempted)
        raise SystemExit(REQUEUE) from preempted
    except KeyboardInterrupt:  # before the run has handlers, or once more while it is being closed
        raise SystemExit(128 + signal.SIGINT) from None
    except (ConfigError, BadInput, ForgeError) as error:
        if isinstance(error, RemoteError):  # a component's code ended its process, or what cannot be sent
            print_user_frames(error)
        raise SystemExit(masked(f"error: {error}")) from error
    except BrokenPipeError as error:
        if not _has_no_reader(sys.stdout):  # a pipe of something else
            raise
        # Python would fail once more when it flushes standard output at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit("error: the reader of standard output has ended, and so has the run") from error
    except Exception as error:
        # Imported here: checkpoints bring the trainer along, which this process does not need.
        from ..envs.group import NothingScored
        from ..rewards.reward import BadScore
        from ..training.checkpoint import CheckpointFailed

        full = isinstance(error, OSError) and error.errno in FULL
        if isinstance(error, CheckpointFailed | DamagedFile | NoAccelerator) or full:
            raise SystemExit(masked(f"error: {error}")) from error
        if not print_user_frames(error) and not isinstance(error, BadScore | NothingScored):
            raise
        raise SystemExit(masked("\n".join([f"error: {summary(error)}", *getattr(error, "__notes__", ())]))) from error


def print_user_frames(error: BaseException) -> bool:
    """Print the traceback of an exception as far as it is in the user's own code; whether there was any."""
    if frames := user_frames(error):
        print(masked("\n".join(["Traceback in your code (most recent call last):", *frames])), file=sys.stderr)
    return bool(frames)


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What Python prints of an exception that ends it, without secrets."""
    print(masked("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def _has_no_reader(stream: TextIO) -> bool:
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


class BadInput(ValueError):
    """Invalid input of a run: the fault and the remedy in one line. No process was started."""


def execute(recipe: Recipe, cfg: Any, *, resume: str | None = None) -> Path:
    """Check everything, run a recipe to its end, and close everything that it has opened.

    Returns:
        the run's folder.

    Raises:
        BadInput: the model, the data or the folder do not allow the run; nothing was started.
        ForgeError, CheckpointFailed, OSError: what the run ended with. Whatever else the recipe raises.
    """
    configure_logging()
    if locale.getencoding().lower().replace("-", "") != "utf8" and not sys.flags.utf8_mode:
        raise BadInput(f"the locale's encoding is {locale.getencoding()}, and files are in UTF-8: set PYTHONUTF8=1")
    if sys.flags.optimize > 1:
        raise BadInput("transformers needs docstrings, which PYTHONOPTIMIZE=2 (-OO) removes: set PYTHONOPTIMIZE=1")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, OPEN_FILES)), hard))
    if hard < OPEN_FILES // 4:
        raise BadInput(f"this shell allows {hard} open files (ulimit -n -H), and a run needs up to {OPEN_FILES}")
    folder = Path(cfg.run.root) / cfg.run.name
    preemption = Preemption(deadline_of(cfg.run.save_before))
    with ExitStack() as signals, ExitStack() as closing:
        if cfg.checkpoint.every and threading.current_thread() is threading.main_thread():
            # Until the run has handlers of its own: the default action would end it without its exit code.
            before = signal.signal(signal.SIGUSR1, lambda *_: preemption.request("SIGUSR1"))
            closing.callback(signal.signal, signal.SIGUSR1, before)
        try:
            closing.callback(RunLock(folder).close)
            start = find_start(cfg, resume)
            if start.finished:
                log.info("%s is finished: it ended after step %d", folder, start.step)
                return folder
            model, held_out, record = prepare(cfg, start)
        except (ValueError, OSError, ImportError) as error:
            raise BadInput(str(error)) from error
        closing.callback(record.close)
        try:
            try_tokenizer(Path(model))
        except ValueError as error:
            raise BadInput(str(error)) from error
        closing.enter_context(forked_processes())
        log_to(internal := record.folder / MONARCH)
        log.info("Monarch's log is %s", internal)
        closing.callback(log_to, None)
        use(store := VersionStore.create())
        closing.callback(store.close)
        try:
            saved = preemption if cfg.checkpoint.every else None
            try:
                run(
                    recipe(cfg, Job(model, held_out, record, store, saved)),
                    cfg.cluster.configured_hosts,
                    cfg.cluster.wait,
                    on_preemption=None if saved is None else saved.request,
                )
            except SystemExit as error:
                if error.code:
                    raise
                raise RuntimeError(f"code of the run raised {error!r} before its end") from error
            finally:  # `run` had handlers of its own, and leaves the default ones
                signals.enter_context(finishing("the run has ended and is being closed"))
        except BaseException as error:
            gone = [path for path in (record.folder, store.root) if not path.is_dir()]
            if gone and isinstance(error, ForgeError | OSError | RuntimeError):
                raise ForgeError(f"{gone[0]} was removed while the run used it; it ended with: {error}") from error
            write_ending(record, error)
            raise
        record.finish()
        if (exported := Path(record.model)).is_dir():
            write_card(exported, recipe.__module__.rpartition(".")[2], to_dict(cfg), record.history)
            if cfg.checkpoint.push_to_hub:
                publish(exported, cfg.checkpoint.push_to_hub)
    return folder


def write_ending(record: Run, error: BaseException) -> None:
    """Have the folder of a run say why it ended, and an exception at which step."""
    if isinstance(error, Preempted):
        record.fail(str(error), stopped=True)
    elif isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
        record.fail(signal.Signals(error.code - 128).name, stopped=True)
    elif isinstance(error, Exception):
        step = int(record.history[-1]["step"]) + 1 if record.history else 0
        error.add_note(f"in step {step} of {record.folder}")
        record.fail(summary(error), "".join(traceback.format_exception(error)), full=is_full(error))
    else:
        record.fail(summary(error), stopped=True)


def publish(model: Path, repository: str) -> None:
    """Upload a finished run's model. ForgeError: it could not be; the run stays finished, with its model."""
    try:
        log.info("uploaded %s to %s", model, upload(model, repository))
    except Exception as error:  # of the hub, its HTTP client or the network: there is no common class
        raise ForgeError(
            f"{model} could not be uploaded ({' '.join(str(error).split())}); the run is complete. "
            f"Try again: hf upload {repository} {model}"
        ) from error


def prepare(cfg: Any, start: Start) -> tuple[str, list[Any], Run]:
    """The model, the held-out problems and the run's folder, once everything is checked.

    Raises:
        ValueError, OSError, ImportError: the fault, in one line.
    """
    folder, initial = Path(cfg.run.root) / cfg.run.name, Path(f"{cfg.run.root}/{cfg.run.name}-initial")
    overwrite = start.checkpoint is None and (cfg.run.overwrite or start.restart)
    settings = to_dict(cfg)  # before the data bounds the steps, in which a resumed run would differ
    # It prints a line for each retry; the error that it raises is enough.
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    check_trackers(to_dict(cfg.metrics))
    if cfg.checkpoint.push_to_hub is not None:
        check_upload(cfg.checkpoint.push_to_hub)
    check_hosts(cfg)
    if hasattr(cfg, "serve") and (listening := cfg.serve.listening()) is not None:
        listening.close()  # the generator listens there once it has started
    for name in filter(None, (cfg.model, *cfg.others().values())):
        check_family(name)
    others = [resolve_model(name) for name in cfg.others().values()]
    if start.checkpoint is None:
        check_free(folder, overwrite)
        model = resolve_model(cfg.model) if cfg.model else build_small_model(initial, seed=cfg.seed, **cfg.from_scratch)
    else:
        model = resolve_model(cfg.model or str(initial))
        check_origin(folder, [model, *others], local(cfg.files))
    check_model(cfg, model)
    check_shared(cfg, model)
    check_others(cfg, model, dict(zip(cfg.others(), others, strict=True)))
    cfg.check_tokenizer(model)
    cfg.check_reward()
    with reported("reading and checking the data"):
        items, held_out = check_data(cfg.data(model), cfg.eval, model, cfg.seed, cfg.scorers)
    if items is not None and (steps := -(-items // cfg.training.batch_size)) < cfg.training.steps:
        log.info(
            "the data ends after its epochs, %d %ss or %d steps of %d: so does the run, before training.steps = %d",
            *(items, NOUNS[cfg.dataset.kind], steps, cfg.training.batch_size, cfg.training.steps),
        )
        cfg.training.steps = steps
    if isinstance(cfg.dataset, DatasetConfig) and cfg.dataset.target_pattern is None:
        solutions = [sample.target for sample in held_out if re.search(r"####|\\boxed\{", sample.target or "")]
        if 2 * len(solutions) > len(held_out):
            log.warning(
                "dataset.target_field %s looks like a whole solution (%.60r): set dataset.target_pattern to the "
                "part that responses are compared with",
                cfg.dataset.target_field,
                solutions[0][-60:],
            )
    if cfg.eval.every and not cfg.eval.problems:
        log.warning(
            "eval.every = %d does nothing, for eval.problems is 0: set it to a number of held-out problems (in Python "
            "give eval_dataset)",
            cfg.eval.every,
        )
    if needs := memory_report(cfg, model):
        log.info("memory, without activations and caches: %s", "; ".join(needs))
    check_space(cfg, model, start.step, overwrite)
    if os.environ.get("TORCHSTORE_USE_RDMA"):
        log.info(
            "TORCHSTORE_USE_RDMA: processes on one host share weights in memory, without RDMA; between hosts weights "
            "go through Monarch's RDMABuffer wherever it finds RDMA, set or not"
        )
    if overwrite or (start.checkpoint is None and (folder / MARK).exists()):
        check_overwrite(cfg, model)
    record = Run(
        cfg.run.name,
        settings,
        root=cfg.run.root,
        overwrite=overwrite,
        steps=cfg.training.steps,
        resume=start.checkpoint,
        start=start.step,
        peak=cfg.metrics.peak_tflops or peak_tflops(cfg.services.trainer.threads, gpu_name()),
        report=write_report,
    )
    if start.checkpoint is None:
        write_origin(folder, [model, *others], local(cfg.files))
    else:
        log.info("resuming from %s", start.checkpoint)
    return model, held_out, record


def check_model(cfg: Any, model: str) -> None:
    """Reject a model that the trainer, an engine or a critic cannot have, or cannot divide as configured.

    Raises:
        ValueError: names what does not fit. ImportError: the trainer's backend is not installed.
    """
    from transformers import AutoConfig

    from ..engines.vllm_args import check_keys
    from ..engines.weights import check_head, load_config

    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    cfg.trainer.check_model(config)
    cfg.training.check(config)
    check_head(Path(model), config)
    generator = getattr(cfg, "generator", None)
    if generator is not None and getattr(cfg.eval, "accuracy", True):
        generator.check(config)
        if generator.engine == "embedded":
            load_config(Path(model))
        else:
            check_keys(config)
    cfg.parallelism.check(config)
    if cfg.trainer.backend == "titan":
        cfg.layout("trainer").over(cfg.placement("trainer")["procs"]).check_experts(config)
    for scalar in cfg.scalar(model):
        config = AutoConfig.from_pretrained(resolve_model(scalar), trust_remote_code=False)
        check_classifier(config)
        cfg.parallelism.check(config)


def check_others(cfg: Any, model: str, others: dict[str, str]) -> None:
    """Reject further models that do not go with the one that is trained.

    Args:
        others: folders, by the key that names them.

    Raises:
        ValueError: names what does not fit.
    """
    from transformers import AutoConfig

    from ..engines.weights import check_head

    reach = cfg.reach(AutoConfig.from_pretrained(model, trust_remote_code=False))
    reference = getattr(cfg.services, "ref_model", None)
    for key, other in others.items():
        check_vocabulary(key, other, model)
        config = AutoConfig.from_pretrained(other, trust_remote_code=False)
        check_head(Path(other), config)
        most, limit = longest(config), rotary_limit(config)
        if most < reach:
            message = (
                f"{key}: {other} takes {most} tokens, and sequences may have {reach}: set training.seq_len to {most}"
            )
            if limit is not None and limit[0] < reach:
                raise ValueError(message)
            log.warning("%s", message)  # transformers computes what its rotary embeddings extend to
        if reference is not None and reference.procs > 1:
            cfg.parallelism.check(config)


def local(paths: list[str]) -> list[str]:
    """Those paths that are of this machine and no hub ids."""
    return [path for path in paths if "{" not in path and Path(path).exists()]


def check_overwrite(cfg: Any, model: str) -> None:
    """Reject a run that would overwrite its own input.

    Raises:
        ValueError: the model or the data lie in the folder that would be removed.
    """
    folder = (Path(cfg.run.root) / cfg.run.name).resolve()
    for name in (model, *local(cfg.files), cfg.eval.path, *cfg.others().values()):
        if isinstance(name, str) and Path(name).resolve().is_relative_to(folder):
            raise ValueError(f"the new run would remove {name}, which it reads: choose another run.name")


def check_vocabulary(key: str, other: str, model: str) -> None:
    """Reject a second model with a different vocabulary.

    Raises:
        ValueError: the tokenizers differ; names the key.
    """
    if open_tokenizer(other).get_vocab() != open_tokenizer(model).get_vocab():
        raise ValueError(f"{key}: the tokens of {other} are not those of {model}: choose a model of the same family")


def check_data(
    dataset: RowsConfig, evaluation: EvalConfig, model: str, seed: int, scorers: Sequence[Any] = ()
) -> tuple[int | None, list[Any]]:
    """Open the data once to check it.

    Returns:
        how many items its epochs have, None if it is endless; and the held-out items: samples, episodes or pairs.

    Args:
        scorers: their `warning(targets)`, of those that have it, is logged.

    Raises:
        ValueError, FileNotFoundError: see `forge.data.load.load_data`; or there is nothing to hold out, or epochs of
            unknown length.
    """
    from ..data.load import Mixture, load_data
    from ..data.prompts import PromptDataset

    tokenizer = open_tokenizer(model)
    training = load_data(tokenizer, kind=dataset.kind, seed=seed, **dataset)
    if isinstance(training, PromptDataset | Mixture):
        for scorer in scorers:
            if hasattr(scorer, "warning") and (text := scorer.warning(training.targets())):
                log.warning("%s", text)
    streams = training.sources if isinstance(training, Mixture) else [training]
    if any(stream.epochs is not None and stream.size is None for stream in streams):
        raise ValueError(
            "dataset.epochs needs data of a known length, which streamed rows do not have: leave it out, and set "
            "training.steps, or leave out streaming"
        )
    if not evaluation.problems:
        return training.size, []
    if dataset.procedural and evaluation.path is None:
        return training.size, training.held_out(evaluation.problems)
    if evaluation.path is None:
        if dataset.sources is not None:
            raise ValueError("with dataset.sources, set eval.path to a file of held-out rows, or eval.problems to 0")
        if str(dataset.path).endswith((".json", ".jsonl", ".parquet")):
            raise ValueError(
                f"{dataset.path} is a single file: set eval.path to a file of held-out problems, or eval.problems to 0"
            )
    settings = {
        **dataset,
        **{"path": evaluation.path or dataset.path, "task": None, "sources": None},
        **{"split": evaluation.split, "streaming": False, "shuffle": False},
    }
    if "epochs" in settings:
        settings["epochs"] = None
    held_out = load_data(tokenizer, kind=dataset.kind, seed=seed, **settings).held_out(evaluation.problems)
    shared = sum(training.has(item) for item in held_out)
    if shared:
        log.warning(
            "%d of the %d held-out %ss are also in the training data, so their results say little about others: give "
            "eval.path rows of its own",
            *(shared, len(held_out), NOUNS[dataset.kind]),
        )
    return training.size, held_out
