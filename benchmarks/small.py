"""Starts each script of this folder in a small form, so that it ends within seconds: none may stop working unnoticed.

    python benchmarks/small.py            # all, two at once
    python benchmarks/small.py service    # some

Scripts that need a GPU, another library, the results of long runs or minutes only print their help, after all their
imports.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
HELP = "--help"
# The arguments of each script that is a program.
FORMS = {
    "agent_soak": HELP,
    "algorithms": HELP,
    "answers": HELP,
    "breakages": HELP,
    "chaos": "--components reward --faults SIGKILL",
    "engine": "--models 3.2M --loads fixed --batches 4 --prompt 8 --tokens 4 --repeats 1",
    "engine_vllm": HELP,
    "exact": "--models 1.0M --rows 8 --tokens 8 --repeats 1",
    "gpu": HELP,
    "gpu_counts": HELP,
    "layouts": HELP,
    "losses": "",
    "processor": "",
    "quickstart": HELP,
    "real": HELP,
    "resume": "--runs 0",
    "scripted_gateway": HELP,
    "service": "--rounds 1 --times 5 --replicas 2 --per-process 2 --queue 20",
    "soak": HELP,
    "two_gpus": "--size tiny --parts collectives",
    "vs_trl": "--hidden 128 --layers 1 --prompts 2 --group 2 --length 4 --steps 4 --rounds 1",
    "watch": "--episodes 64 --tokens 5",
    "weaver": "drift --seeds 1",
    "weaver_rl": HELP,
    "weight_sync": HELP,
}
# Shows the help of several scripts in one process, which imports PyTorch and transformers once.
SHOW_HELPS = """
import runpy, sys

for path in sys.argv[1:]:
    sys.argv = [path, "--help"]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        assert not end.code, path
    else:
        raise AssertionError(f"{path} has no --help")
"""
# Of an environment with TRL and verl; run by tests/forge_inspect/test_plan.py; this script.
WITHOUT = {"losses_peers", "planned_memory", "small"}


def run_small(names: list[str]) -> bool:
    """Run a script, or show the help of several; print how long it took, and its output if it failed. Return whether it
    ended well."""
    began = time.monotonic()
    paths = [str(FOLDER / f"{name}.py") for name in names]
    words = ["-c", SHOW_HELPS, *paths] if FORMS[names[0]] == HELP else [*paths, *FORMS[names[0]].split()]
    command = ["timeout", "300", sys.executable, *words]
    # Some import others of this folder by their names, some by the folder's.
    environment = os.environ | {"PYTHONPATH": f"{FOLDER.parent}:{FOLDER}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=FOLDER.parent, env=environment, capture_output=True, text=True, check=False)
    print(f"{', '.join(names)}: exit code {done.returncode} after {time.monotonic() - began:.0f} s", flush=True)
    print((done.stdout + done.stderr) * (done.returncode != 0), end="")
    return not done.returncode


if __name__ == "__main__":
    programs = {path.stem for path in FOLDER.glob("*.py") if 'if __name__ == "__main__"' in path.read_text()}
    if missing := programs - WITHOUT - {*FORMS}:
        sys.exit(f"benchmarks/small.py has no small form of {', '.join(sorted(missing))}")
    chosen = sys.argv[1:] or list(FORMS)
    helps = [name for name in chosen if FORMS[name] == HELP]
    forms = [*([helps] if helps else []), *([name] for name in chosen if FORMS[name] != HELP)]
    with ThreadPoolExecutor(2) as pool:
        sys.exit(not all(list(pool.map(run_small, forms))))
