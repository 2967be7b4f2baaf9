"""Where the memory of a rank goes: a stacked bar of each component's plan, for some recipes.

python benchmarks/plan_picture.py --out docs/plan.png
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import matplotlib

from forge_inspect.cli.plan import planned
from forge_inspect.plan.devices import CONTEXT, GB
from forge_inspect.plan.trainers import ComponentPlan

matplotlib.use("Agg")
from matplotlib import pyplot

GPUS = "8xH100"
MIXTURE = ["--model", "Qwen/Qwen3-30B-A3B", "--services.trainer.procs", "8", "--trainer.backend", "titan"]
COLOURS = {
    "weights": "#4477aa",
    "gradients": "#66ccee",
    "optimizer": "#228833",
    "activations": "#ccbb44",
    "gathered": "#ee6677",
    "next version": "#aa3377",
    "cache": "#dddddd",
    "others": "#999999",
    "driver": "#555555",
}


class Bar(NamedTuple):
    """A component of a recipe, whose label says what it trains and on how many ranks."""

    label: str
    recipe: str
    overrides: list[str]
    component: str = "trainer"


BARS = [
    Bar("SFT, 8B, trainer, kept activations", "apps/sft/qwen3_8b.yaml", ["--training.gradient_checkpointing", "false"]),
    Bar("SFT, 8B, trainer", "apps/sft/qwen3_8b.yaml", []),
    Bar("SFT, 32B, trainer", "apps/sft/qwen3_32b.yaml", []),
    Bar("SFT, 30B-A3B, trainer, FSDP 8", "apps/sft/qwen3_8b.yaml", MIXTURE),
    Bar(
        "SFT, 30B-A3B, trainer, experts 8",
        "apps/sft/qwen3_8b.yaml",
        [*MIXTURE, "--parallelism.expert_parallel_degree", "8"],
    ),
    Bar("GRPO, 1.7B, trainer", "apps/grpo/qwen3_1_7b.yaml", []),
    Bar("GRPO, 1.7B, generator", "apps/grpo/qwen3_1_7b.yaml", [], "generator"),
]


def component_of(bar: Bar) -> tuple[ComponentPlan, str]:
    """The plan of a bar's component, and its label with the number of processes."""
    _, plan = planned(bar.recipe, list(bar.overrides), GPUS)
    component: ComponentPlan = next(part for part in plan.components if part.name == bar.component)
    return component, f"{bar.label}\n({component.processes} processes)"


def draw(out: Path) -> None:
    """Write the picture."""
    figure, axes = pyplot.subplots(figsize=(9, 4.2))
    seen = set()
    components = [component_of(bar) for bar in BARS]
    for row, (component, label) in enumerate(components):
        sizes = component.parts | ({"driver": CONTEXT} if component.with_gpus else {})
        left = 0.0
        for name, size in sizes.items():
            axes.barh(row, size / GB, left=left, color=COLOURS[name], label=None if name in seen else name)
            seen.add(name)
            left += size / GB
        axes.text(left + 1, row, f"{left:.0f}", va="center", fontsize=8)
        print(f"{label!r}: {left:.1f} GB, " + ", ".join(f"{name} {size / GB:.2f}" for name, size in sizes.items()))
    capacity = components[0][0].capacity / GB
    axes.set_yticks(range(len(BARS)), [label for _, label in components], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(capacity, color="black", linestyle="--", linewidth=1)
    axes.set_xlabel(f"GB of each process, planned; the line is an H100's {capacity:.0f} GB")
    axes.legend(fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.3, 1.16), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the picture")
    draw(parser.parse_args().out)


if __name__ == "__main__":
    main()
