"""`forge launch slurm|ssh|kubernetes CONFIG`: a run on several machines."""

import argparse
import importlib
import itertools
import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.cli.recipes import RECIPES
from forge.cli.subparsers import Subparsers, add_command
from forge.system.masking import mask_secrets, without_secrets

from .processes import run_as_child, submit_text

if TYPE_CHECKING:
    from forge.config.arguments import Arguments
    from forge.recipes.schema import TrainingRecipe

log = logging.getLogger(f"forge.{__name__}")
TEXT = "start a run on several machines, by Slurm, ssh or Kubernetes"
Runs = list[tuple[str, list[str]]]  # name and command line of each run

# The options of all launchers and of each, with the arguments of `add_argument`.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "all": {
        "recipe": {"choices": list(RECIPES), "default": "train", "help": "default: train"},
        "nodes": {"type": int, "default": 1, "help": "machines with a worker"},
        "gpus-per-node": {"type": int, "default": 0},
        "sweep": {"action": "append", "default": [], "metavar": "KEY=A,B", "help": "a run for each value"},
        "seeds": {"type": int, "help": "a run for each seed from 0"},
        "setup": {"default": "", "help": "shell lines before the run: modules, environments"},
        "dry-run": {"action": "store_true", "help": "print what would be submitted"},
    },
    "slurm": {
        "partition": {},
        "cpus-per-node": {"type": int, "help": "cores of each node; default: Slurm's, often 1"},
        "time": {"help": "limit of the job, as sbatch takes it; the run saves itself before"},
        "sbatch": {
            **{"action": "append", "default": [], "metavar": "OPTION"},
            "help": "an additional line, without dashes: account=x",
        },
    },
    "ssh": {
        "hosts": {"required": True, "help": "machines as ssh takes them, separated by commas"},
        "python": {"default": sys.executable, "help": "the Python there; default: this one's path"},
    },
    "kubernetes": {
        "image": {"required": True, "help": "with this library and the run's code"},
        "namespace": {"default": "default"},
        "claim": {"help": "PersistentVolumeClaim (ReadWriteMany) for models, data and the run's folder"},
        "mount": {"default": "/work", "help": "where it is, and the working directory; default: /work"},
        "python": {"default": "python", "help": "of the image"},
        "cpus": {"type": int, "default": 4, "help": "of each pod"},
        "memory": {"default": "16Gi", "help": "of each pod"},
        "shm": {"default": "16Gi", "help": "/dev/shm of each pod: three versions of the weights"},
    },
}


def add_to(commands: Subparsers) -> None:
    """Add the command `forge launch` to the parser."""
    rest = "CONFIG and options, then overrides of the configuration"
    add_command(
        commands,
        "launch",
        TEXT,
        "slurm apps/grpo/gsm8k.yaml --nodes 2 --gpus-per-node 8 --dry-run",
        run,
        [("launcher", {"choices": list(LAUNCHERS)}), ("rest", {"nargs": argparse.REMAINDER, "help": rest})],
        description=f"{TEXT}; forge launch slurm --help lists the options of one",
    )


def run(args: argparse.Namespace) -> None:
    """Launch a run, or each run of a sweep; invalid input ends the program with one line."""
    from forge.config import Arguments, ConfigError
    from forge.recipes.placement import RAISE, gpus_needed
    from forge.recipes.resume import read_config

    from .credentials import check_certificates

    parser = argparse.ArgumentParser(
        prog=f"forge launch {args.launcher}",
        description="Overrides of the configuration may follow: --training.steps 500",
        epilog=f"example: forge launch {args.launcher} apps/grpo/gsm8k.yaml {LAUNCHERS[args.launcher][1]}--dry-run",
        allow_abbrev=False,
    )
    parser.add_argument("config", help="YAML file")
    for name, option in {**OPTIONS["all"], **OPTIONS[args.launcher]}.items():
        parser.add_argument(f"--{name}", **option)

    # Options of the launcher come first; all unknown ones are overrides of the configuration.
    options, overrides = parser.parse_known_args(args.rest)
    module, config_name, _ = RECIPES[options.recipe]
    config_type = getattr(importlib.import_module(module), config_name)

    try:
        runs = []
        for suffix, variant in list_variants(options.sweep, options.seeds):
            arguments = Arguments.parse(["--config", options.config, *overrides, *variant])
            _check_secrets(arguments, options)
            cfg = read_config(config_type, arguments)
            if not cfg.checkpoint.every:  # otherwise the job fails, after its time in the queue
                raise ConfigError("forge launch needs checkpoints to resume after a requeue: set checkpoint.every")

            # None are reserved by ssh, or where a partition gives whole nodes.
            needed, reserved = sum(gpus_needed(cfg).values()), options.nodes * options.gpus_per_node
            if needed > reserved > 0:
                raise ValueError(
                    f"{cfg.run.name} needs {needed} GPUs, and --nodes {options.nodes} --gpus-per-node "
                    f"{options.gpus_per_node} reserve {reserved}"
                )
            if needed < reserved:
                counts = f"{needed} of the {reserved} GPUs that are reserved"
                log.warning("%s uses only %s: %s, or lower --nodes", cfg.run.name, counts, RAISE)

            name = f"{cfg.run.name}-{suffix}" if suffix else cfg.run.name
            recipe = [options.recipe, options.config, *overrides, *variant, "--run.name", name, "--resume", "auto"]
            runs.append((name, [sys.executable, "-m", "forge", *recipe]))

        if args.launcher in ("slurm", "ssh") and not options.dry_run:  # their workers use this Python environment
            check_certificates()
        LAUNCHERS[args.launcher][0](options, cfg, runs)
    except ConfigError as error:
        hint = "" if "--recipe" in args.rest else f" (read as a configuration of forge {options.recipe}, see --recipe)"
        raise SystemExit(mask_secrets(f"error: {error}{hint}")) from error
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        raise SystemExit(mask_secrets(f"error: {error}")) from error


def list_variants(sweeps: Sequence[str], seeds: int | None) -> list[tuple[str, list[str]]]:
    """Return the runs of a sweep, each as a suffix of its name and its overrides of the configuration.

    There is a run for every combination of the swept values and the seeds.

    Args:
        sweeps: each "section.key=value,value".
        seeds: number of seeds, from 0; None for the seed of the configuration.

    Raises:
        ValueError: a sweep is not of this form.

    >>> list_variants(["grpo.beta=0,0.1"], None)
    [('beta0', ['--grpo.beta', '0']), ('beta0.1', ['--grpo.beta', '0.1'])]
    """
    axes: list[list[tuple[str, str]]] = []
    for sweep in sweeps:
        key, equals, values = sweep.partition("=")
        if not equals or not key or not all(values.split(",")):
            raise ValueError(f"--sweep {sweep}: must be written section.key=value,value")
        axes.append([(key, value) for value in values.split(",")])

    # The seed is the last axis, so that runs which differ only in it follow each other.
    if seeds is not None:
        axes.append([("seed", str(seed)) for seed in range(seeds)])
    runs = []
    for combination in itertools.product(*axes):
        # The name is also the name of a folder.
        parts = [re.sub(r"[^A-Za-z0-9._+-]", "_", key.rpartition(".")[2] + value) for key, value in combination]
        overrides = [word for key, value in combination for word in (f"--{key}", value)]
        runs.append(("-".join(parts), overrides))

    return runs


def _check_secrets(arguments: "Arguments", options: argparse.Namespace) -> None:
    """Check that no secret would be in a script, a manifest or the list of processes, which other users can read.

    Raises:
        ValueError: one would be; the message names the option.
    """
    fix = f"which other users could read in the job: put it into {options.config}, or into the job's environment"
    for name, text in arguments.overrides:
        if without_secrets(text, name) != text:
            raise ValueError(f"--{name} holds a secret, {fix}")
    literals = re.sub(r"=\s*[\"']?\$[^\n;&]*", "=", options.setup)  # HF_TOKEN=$(cat token) contains no secret
    if mask_secrets(literals) != literals:
        raise ValueError(f"--setup holds a secret, {fix}")


def _launch_slurm(options: argparse.Namespace, cfg: "TrainingRecipe", runs: Runs) -> None:
    from .slurm import make_script, quote_value

    partition = [f"partition={quote_value(options.partition)}"] if options.partition else []
    folder = Path(cfg.run.root).absolute()
    script = make_script(
        cfg.run.name,
        [command for _, command in runs],
        Path.cwd(),
        folder,
        options.nodes,
        options.gpus_per_node,
        options.time,
        (*partition, *options.sbatch),
        options.setup,
        f"{shlex.quote(sys.executable)} -m forge",
        options.cpus_per_node,
    )
    if options.dry_run:
        print(script)
        return

    folder.mkdir(parents=True, exist_ok=True)
    number = submit_text(["sbatch", "--parsable"], script).partition(";")[0]
    print(f"submitted job {number}, output in {folder}/slurm-*.out")


def _launch_ssh(options: argparse.Namespace, cfg: "TrainingRecipe", runs: Runs) -> None:
    from .ssh import check_words_of_ssh, start_workers

    hosts = options.hosts.split(",")
    check_words_of_ssh(hosts, options.python)
    if options.dry_run:
        worker = [options.python, "-m", "forge", "worker", "--listen", ":0", "--stdin"]
        print("\n".join(shlex.join(["ssh", host, *worker]) for host in hosts))
        print("\n".join(shlex.join(command) for _, command in runs))
        return

    with start_workers(hosts, os.getcwd(), options.python) as environment:
        # One after the other: each has all machines.
        codes = [run_as_child(command, {**os.environ, **environment}) for _, command in runs]
    if any(codes):
        raise SystemExit(next(filter(None, codes)))


def _launch_kubernetes(options: argparse.Namespace, cfg: "TrainingRecipe", runs: Runs) -> None:
    from .kubernetes import make_manifests

    for name, command in runs:
        # Names of runs may contain characters that Kubernetes does not allow.
        job_name = name.lower().replace("_", "-").replace(".", "-")
        manifests = make_manifests(
            job_name,
            [options.python, *command[1:]],
            options.image,
            options.nodes,
            options.gpus_per_node,
            options.cpus,
            options.memory,
            options.shm,
            options.claim,
            options.mount,
            options.python,
            options.namespace,
        )
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}, indent=2)
        if not options.dry_run:
            text = f"{submit_text(['kubectl', 'apply', '-f', '-'], text)}\nkubectl logs -f job/{job_name}"
        print(text)


# By launcher: a function that starts runs, and the options of an example.
LAUNCHERS: dict[str, tuple[Callable[..., None], str]] = {
    "slurm": (_launch_slurm, "--nodes 2 --gpus-per-node 8 "),
    "ssh": (_launch_ssh, "--hosts node1,node2 "),
    "kubernetes": (_launch_kubernetes, "--image registry/forge:0.1 --nodes 2 "),
}
