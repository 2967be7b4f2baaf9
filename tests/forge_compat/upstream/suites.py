"""Test files of TorchStore and torchforge, as their repositories have them: which are run, and what differs here."""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Suite:
    """The test files of a repository.

    Attributes:
        variable: the environment variable that names a checkout of the repository, which may be bare.
        files: those to run; their helpers are copied alongside them.
        imports: patterns of imports, and what replaces them.
        differences: reasons why tests fail here, by the end of their names.
        outside: reasons why files are not run.
        environment: variables of the run.
    """

    name: str
    variable: str
    files: tuple[str, ...]
    helpers: tuple[str, ...] = ()
    imports: Mapping[str, str] = field(default_factory=dict)
    differences: Mapping[str, str] = field(default_factory=dict)
    outside: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """The checkout; empty if there is none."""
        return os.environ.get(self.variable, "")

    def text(self, path: str) -> str:
        """A file of the checkout. FileNotFoundError: the checkout does not have it."""
        words = ["git", "-C", self.source, "show", f"HEAD:{path}"]
        shown = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False) if self.source else None
        if shown is None or shown.returncode:
            raise FileNotFoundError(f"{self.variable} names no checkout of {self.name} with {path}")
        return shown.stdout

    def write(self, folder: Path) -> None:
        """Copy the files into a folder, with the imports changed and nothing else."""
        for path in (*self.files, *self.helpers):
            text = self.text(path)
            for pattern, replacement in self.imports.items():
                text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
            # In a package of another name: this repository's tests are `tests`, too.
            file = folder / path.replace("tests/", f"{self.name}_tests/", 1)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    def reason(self, test: str) -> str | None:
        """Why a test fails here; None if it should pass."""
        return next((reason for name, reason in self.differences.items() if re.search(name, test)), None)


INTERNAL = "tests private parts of the package: "
STATE = INTERNAL + "the tables of replicas and sessions in a service"
TORCHFORGE = Suite(
    name="torchforge",
    variable="FORGE_TORCHFORGE_SOURCE",
    files=tuple(
        f"tests/unit_tests/{name}.py"
        for name in (
            "test_service",
            "test_replay_buffer",
            "observability/test_perf_tracker",
            "losses/test_grpo_loss",
            "rl/test_math_reward",
            "rl/test_thinking_reward",
            "util/test_ops",
            "test_env_constants",
        )
    ),
    helpers=("tests/__init__.py", "tests/conftest.py", "tests/unit_tests/__init__.py"),
    imports={
        r"^from forge\.controller\.service import": "from tests.forge_compat.upstream.private_names import",
        r"^from forge\.data\.rewards import": "from forge_compat.upstream.rewards import",
        r"^from forge\.types import ProcessConfig": (
            "from tests.forge_compat.upstream.private_names import ProcessConfig"
        ),
        r"^from forge\.observability\.perf_tracker import _TimerCPU, _TimerCUDA, trace, Tracer": (
            "from forge.observability.perf_tracker import trace, Tracer\n"
            "from tests.forge_compat.upstream.private_names import _TimerCPU, _TimerCUDA"
        ),
    },
    differences={
        r"test_replay_buffer": "calls private endpoints (_numel, _getitem), setup, and get() of Monarch's futures",
        r"test_options_applies_config": "starts an actor with two replicas, which is an error here: as_service",
        r"test_service_with_kwargs|test_service_default|isolated_configs": INTERNAL + "the configuration in a service",
        r"test_service_endpoint_monarch_method_error": "Monarch's verbs work on a service here: call_one, call, choose",
        r"test_basic_service|test_sessionless|context_manager|test_recovery|failure_and_recovery": STATE,
        r"test_session_stickiness|balancing_multiple|test_concurrent_op|test_session_router": STATE,
        r"test_metrics_collection": "an endpoint's error is raised by the call here; there it is the call's value",
        r"test_comprehensive_workflow|test_tracer_and_timer_reuse|test_metric_timer_uses": INTERNAL + "its timers",
        r"test_memory_tracking|nested_memory_tracking": "replaces parts of torch.cuda, which a CPU build lacks",
        r"test_thinking_reward.*test_regex_patterns": INTERNAL + "compiled expressions of the reward",
    },
    outside={
        "observability/test_metrics.py": INTERNAL + "collectors and backends of one rank, with an emulated Monarch",
        "observability/test_metric_actors.py": INTERNAL + "the actors that collect metrics",
        "observability/test_utils.py": INTERNAL + "the names that metrics have in its backends",
        "test_config.py": "needs omegaconf, and replaces a download: here hf:// is removed and a model is loaded later",
        "test_coder.py": INTERNAL + "the commands for enroot's containers; here forge_sandbox needs none",
        "test_provisioner.py": INTERNAL + "its table of free GPUs",
        "test_generator_config.py": "needs vLLM's arguments at the top of a generator; here generator.vllm",
        "test_torchstore_utils.py": INTERNAL + "handles of checkpoints in the store; here versions",
        "util/test_shared_tensor.py": INTERNAL + "tensors in shared memory; here the store's segments",
        "datasets/": "forge.data.datasets is not here: forge.data.load.load_data",
    },
)

SUITES = (TORCHFORGE,)
