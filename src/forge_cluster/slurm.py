"""`forge launch slurm`: the batch script of a run, for Slurm 22.05 and newer."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from forge.runtime.names import REQUEUE

GRACE = 3600  # seconds that workers serve after SIGTERM; Slurm's own GraceTime is shorter
BEFORE_END = 300  # seconds before the time limit at which Slurm sends SIGUSR1: time to write a checkpoint

# The script of a job: a worker on every machine, and the run on the first.
SCRIPT = """#!/bin/bash
{options}

# Each node runs a worker, which registers in a folder that all nodes see. The first node also runs the controller,
# which takes the workers from there.
cd {folder}
export FORGE_HOSTS={runs}/hosts-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}
export FORGE_EXPECT_HOSTS=$SLURM_JOB_NUM_NODES
export FORGE_SECRET=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n')
mkdir -p "$FORGE_HOSTS"
{setup}
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1{cpus} --no-kill --kill-on-bad-exit=0 --export=ALL \\
    {forge} worker --listen :0 --register "$FORGE_HOSTS" --grace {grace} &
workers=$!

{command} &
controller=$!
# Sent by Slurm before the time limit (--signal): the run saves itself and ends.
trap 'kill -USR1 $controller 2>/dev/null' USR1 TERM
while :; do
    wait $controller; code=$?
    kill -0 $controller 2>/dev/null || break   # otherwise a signal has ended the wait
done
[ $code -le 128 ] || {{ wait $controller; code=$?; }}
kill $workers 2>/dev/null; wait $workers 2>/dev/null
rm -rf "$FORGE_HOSTS"

# {requeue}: it was saved, and has to be continued. A job that was cancelled is not.
if [ $code = {requeue} ] && [ "$(squeue --noheader --job "$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


def quote_value(value: str) -> str:
    """Return a value quoted so that sbatch reads it from a line of options as one word, whatever it contains.

    >>> quote_value("a b")
    '"a b"'
    """
    if re.fullmatch(r"[\w%@:.,/+=-]*", value, re.ASCII):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def make_script(
    name: str,
    commands: list[list[str]],
    folder: Path,
    runs: Path,
    nodes: int = 1,
    gpus_per_node: int = 0,
    time: str | None = None,
    extra_options: Sequence[str] = (),
    setup: str = "",
    forge: str = "forge",
    cpus_per_node: int | None = None,
) -> str:
    """Return the batch script of a job with one run, or of an array of several.

    Args:
        name: of the job.
        commands: the arguments of the command of each run; an array has a task for each run.
        folder: the working directory of the run.
        runs: the folder of all runs, which all nodes see.
        time: limit of the job as sbatch takes it; None for the partition's limit.
        extra_options: of sbatch without the dashes, such as "partition=gpu".
        setup: shell lines before the run, to load modules or an environment.
        forge: the shell command that starts the program `forge` on the nodes.
        cpus_per_node: cores of each node; None for Slurm's default.

    Raises:
        ValueError: an option contains a line break or another control character, after which sbatch would read another
            option or command.
    """
    output = "slurm-%j.out" if len(commands) == 1 else "slurm-%A-%a.out"
    lines = [
        f"job-name={quote_value(name)}",
        f"nodes={nodes}",
        "ntasks-per-node=1",
        *([f"gpus-per-node={gpus_per_node}"] if gpus_per_node else []),
        *([f"cpus-per-task={cpus_per_node}"] if cpus_per_node else []),
        *([f"time={quote_value(time)}"] if time else []),
        "requeue",
        "no-kill",
        "open-mode=append",
        f"signal=B:USR1@{BEFORE_END}",
        f"output={quote_value(f'{runs}/{output}')}",
        *([f"array=0-{len(commands) - 1}"] if len(commands) > 1 else []),
        *extra_options,
    ]

    # The options are lines of the script: a line break in one would start a command.
    for line in lines:
        if not line.isprintable():
            raise ValueError(f"{line!r} cannot be passed to sbatch: remove the line break or other control character")

    # An array job runs the command that its task number selects.
    command = shlex.join(commands[0])
    if len(commands) > 1:
        cases = "\n".join(f"    {n}) set -- {shlex.join(words)} ;;" for n, words in enumerate(commands))
        command = f'case $SLURM_ARRAY_TASK_ID in\n{cases}\nesac\n"$@"'

    return SCRIPT.format(
        options="\n".join(f"#SBATCH --{line}" for line in lines),
        folder=shlex.quote(str(folder)),
        runs=shlex.quote(str(runs)),
        setup=setup,
        forge=forge,
        cpus=f" --cpus-per-task={cpus_per_node}" if cpus_per_node else "",
        command=command,
        grace=GRACE,
        requeue=REQUEUE,
    )
