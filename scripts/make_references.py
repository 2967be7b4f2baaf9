"""Run recipes with several seeds, and write their curves as references: python scripts/make_references.py [NAMES]

Two runs at a time, one thread each. A recipe that is listed with another one before it starts from that one's model of
the same seed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks import processor  # noqa: E402
from forge_inspect.reference import make_reference, write_reference  # noqa: E402

REFERENCES = ROOT / "src/forge_inspect/references"
# The programs of a recipe in their order; each of apps, with its configuration or file.
SFT, GRPO = "sft.main sft/tiny.yaml", "grpo.main grpo/tiny.yaml"
TOOLS = ["tools.demonstrate runs/tools-demonstrations.jsonl", "sft.main tools/warmup.yaml"]
CODE = ["code.demonstrate runs/code-demonstrations.jsonl", "sft.main code/warmup.yaml"]
RECIPES = {
    "sft/tiny": [SFT],
    "grpo/tiny": [SFT, GRPO],
    "dpo/tiny": [SFT, "dpo.main dpo/tiny.yaml"],
    "reward_model/tiny": [SFT, "reward_model.main reward_model/tiny.yaml"],
    "distill/tiny": [SFT, GRPO, "distill.main distill/tiny.yaml"],
    "tools/warmup": TOOLS,
    "tools/tiny": [*TOOLS, "tools.main tools/tiny.yaml"],
    "code/warmup": CODE,
    "code/tiny": [*CODE, "code.main code/tiny.yaml"],
}


def run_recipe(name: str, seed: int, folder: Path) -> Path:
    """Run the programs of a recipe with a seed in a folder of their own, and return the run directory of the last."""
    place = folder / f"{seed}"
    place.mkdir(parents=True, exist_ok=True)
    if not (place / "apps").exists():
        (place / "apps").symlink_to(ROOT / "apps")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    for step in RECIPES[name]:
        program, file = step.split()
        arguments = ["--config", f"apps/{file}", "--seed", str(seed)] if file.endswith(".yaml") else [file]
        log = place / f"{file.replace('/', '-')}.log"
        if not log.with_suffix(".done").exists():
            with log.open("w") as output:
                command = [sys.executable, "-m", f"apps.{program}", *arguments]
                subprocess.run(command, cwd=place, env=environment, stdout=output, stderr=output, check=True)
            log.with_suffix(".done").touch()
    return place / "runs" / yaml.safe_load((ROOT / "apps" / file).read_text())["run"]["name"]


def main() -> None:
    """Make the references that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(RECIPES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--folder", type=Path, default=ROOT / "build/references")
    parser.add_argument("--parallel", type=int, default=2)
    args = parser.parse_args()
    commit = subprocess.check_output(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, text=True).strip()
    REFERENCES.mkdir(exist_ok=True)

    with ThreadPoolExecutor(args.parallel) as pool:
        for name in args.names:
            folders = list(pool.map(lambda seed, name=name: run_recipe(name, seed, args.folder), args.seeds))
            reference = make_reference(folders, name)
            provenance = {"commit": commit, "cpu": processor.name(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
            reference = replace(reference, provenance={**provenance, **reference.provenance})
            write_reference(reference, REFERENCES / f"{name.replace('/', '-')}.json")
            print(f"{name}: {reference.steps} steps, {reference.seeds} seeds", flush=True)


if __name__ == "__main__":
    main()
