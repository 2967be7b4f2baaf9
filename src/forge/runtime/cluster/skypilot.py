"""`forge launch skypilot`: a task for SkyPilot, which finds machines in clouds."""

from __future__ import annotations

import re
import shlex

from .wire import PORT, Json
from .words import check_words

# SkyPilot runs this on every machine: all have a worker, and the first one the run as well.
RUN = """export FORGE_HOSTS=$(echo "$SKYPILOT_NODE_IPS" | sed 's/$/:{port}/' | paste -sd, -)
export FORGE_EXPECT_HOSTS=$SKYPILOT_NUM_NODES
own=$(echo "$SKYPILOT_NODE_IPS" | sed -n "$((SKYPILOT_NODE_RANK + 1))p")
forge worker --listen "$own:{port}" --once &
if [ "$SKYPILOT_NODE_RANK" = 0 ]; then
    {command}; code=$?
    kill %1; exit $code
fi
wait   # until the run is over
"""


def task(
    name: str, command: list[str], nodes: int, gpus_per_node: int, accelerator: str, setup: str
) -> dict[str, Json]:
    """Return the task, to be written as YAML. `sky launch --secret FORGE_SECRET=$(openssl rand -hex 32) FILE` runs it.

    Args:
        accelerator: the kind of GPU, as SkyPilot names it: H100.
        setup: shell lines that install the dependencies.

    Raises:
        ValueError: SkyPilot does not accept the name or accelerator, or a word has a NUL.
    """
    # Checked here: `sky launch` would fail after it has rented a machine.
    check_words([setup, *command])
    if re.fullmatch(r"[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*", name) is None:
        raise ValueError(
            f"{name[:80]!a} cannot be the name of a task: set run.name to letters, digits and single dashes"
        )
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", accelerator) is None:
        raise ValueError(
            f"--accelerator {accelerator[:80]!a} is not an accelerator: write its name alone, such as H100"
        )
    return {
        "name": name,
        "num_nodes": nodes,
        "resources": {"accelerators": f"{accelerator}:{gpus_per_node}"} if gpus_per_node else {"cpus": "4+"},
        "workdir": ".",
        "secrets": {"FORGE_SECRET": None},
        "setup": setup,
        "run": RUN.format(port=PORT, command=shlex.join(command)),
    }
