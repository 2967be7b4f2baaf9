"""References: seeds of a recipe, and runs within and outside of their bands."""

import json

import numpy as np
import pytest
import yaml

from forge.cli import main

SETTINGS = {"model": "m", "seed": 0, "training": {"learning_rate": 1e-3, "steps": 40}, "run": {"name": "a"}}


def write_run(folder, seed, reward=1.0, rate=1e-3, steps=40):
    """Write a run whose reward rises to `reward`, with the noise of a seed, and return its folder."""
    draw = np.random.default_rng(seed)
    offset, rows = draw.normal(0, 0.02), []
    for step in range(steps + 1):
        values = {"reward": reward * step / 40 + offset, "train/entropy": 2 - step / 40 + offset}
        noisy = {name: value + draw.normal(0, 0.03) for name, value in values.items()}
        rows.append({"step": step, "train/learning_rate": rate * min(1, step / 20), "seconds": step, **noisy})
    folder.mkdir()
    settings = SETTINGS | {"seed": seed, "training": SETTINGS["training"] | {"learning_rate": rate}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_compare_names_metrics_outside_bands_of_reference_runs(tmp_path, capsys):
    seeds = [write_run(tmp_path / f"seed{seed}", seed) for seed in range(5)]
    reference = str(tmp_path / "mine.json")
    main(["compare", "--save", reference, *seeds])

    for seed in range(10, 30):
        main(["compare", write_run(tmp_path / f"new{seed}", seed, steps=seed), reference])
    assert capsys.readouterr().out.count("within the bands of 3 metrics up to step") == 20

    main(["compare", write_run(tmp_path / "flat", 50, reward=0.0), reference])
    assert "reward left the band at step" in (printed := capsys.readouterr().out)
    assert "entropy left" not in printed

    main(["compare", write_run(tmp_path / "fast", 51, rate=1e-2), reference])
    printed = capsys.readouterr().out
    assert "training.learning_rate  0.01  0.001" in printed
    assert "train/learning_rate left the band at step 1" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare", "--save", "out.json", "a", "b"], "needs at least 3 runs, got 2"),
        (
            ["compare", "--save", "out.json", "a", "b", "other"],
            "other differs from .*a in more than its seed: tr",
        ),
        (["compare", "a"], "is a run of none of the references: name another run"),
        (["compare", "a", "a/config.yaml"], "is not a reference"),
    ],
)
def test_invalid_compare_references_raise_one_line_error(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, rate in (("a", 1e-3), ("b", 1e-3), ("other", 1e-2)):
        write_run(tmp_path / name, 0, rate=rate)
    with pytest.raises(SystemExit, match=message):
        main(words)
