"""Weights between two hosts over a real run: differences against whole versions.

python -m apps.sft.main --config apps/sft/tiny.yaml
python benchmarks/delta_sync.py record [--steps 200] [--folder build/delta-sync]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from safetensors.torch import save_file

import forge
from forge.config.sections import read_file
from forge.runtime.store import default_store

ROOT = Path(__file__).parents[1]
KEY = "policy"


def record(folder: Path, steps: int) -> None:
    """Train the quickstart, and keep the weights that it publishes, a file for each version."""
    folder.mkdir(parents=True, exist_ok=True)

    def keep(step: int, metrics: dict[str, float]) -> None:
        store = default_store()
        version = store.versions(KEY)[-1]
        assert version == step, f"step {step} ends with version {version}"
        save_file(store.get(KEY, version=version), folder / f"{version:04d}.safetensors")

    settings = read_file(ROOT / "apps/grpo/tiny.yaml")
    settings["run"] = {"root": str(folder), "name": "run", "overwrite": True}
    settings["training"] |= {"steps": steps}
    settings["eval"] |= {"every": steps}
    named = {name: settings.pop(name) for name in ("model", "dataset", "algorithm", "reward")}
    forge.train(**named, on_step=keep, **settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["record"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=ROOT / "build/delta-sync")
    arguments = parser.parse_args()
    record(arguments.folder, arguments.steps)


if __name__ == "__main__":
    main()
