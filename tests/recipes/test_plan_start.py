"""What a run on GPUs logs of their memory before it starts, for devices that are given: there are none here."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from forge.cli import main
from forge.cli.plan import planned
from forge.config import build
from forge.data.files import Rows
from forge.models import build_small_model
from forge.models.read_once import model_config
from forge.recipes.memory import readable
from forge.recipes.plan import start
from forge.recipes.plan.devices import DEVICES, Machines, device_of
from forge.recipes.plan.generation import engine_memory
from forge.recipes.plan.remedies import engine_remedy
from forge.recipes.plan.start import gpus_here, log_plan
from forge.recipes.prepare import prepare
from forge.recipes.resume import Start
from forge.recipes.rl_config import RLConfig, SeveralPoliciesConfig
from forge.recipes.schema import TrainingRecipe

GB = 1e9
SHAPE = {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "max_positions": 4096}
ROWS = [{"question": "1+1=", "answer": "2"}]
GPUS = {"trainer": {"with_gpus": True}, "generator": {"with_gpus": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 4,096 positions, of which attention's numbers are the largest part of a pass."""
    return build_small_model(tmp_path_factory.mktemp("small") / "model", seed=0, alphabet="0123456789+= ", **SHAPE)


def recipe(model: Path, **sections: object) -> RLConfig:
    settings: dict[str, object] = {
        "model": str(model),
        "dataset": {"path": Rows(ROWS)},
        "training": {"seq_len": 4096},
        "generator": {"slots": 8, "max_seq_len": 512},
        "services": GPUS,
    }
    return build(RLConfig, settings | sections)


def logged(cfg: TrainingRecipe, model: Path, caplog: pytest.LogCaptureFixture, gigabytes: float) -> list[tuple]:
    device = replace(DEVICES["H100"], memory=gigabytes * GB)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        log_plan(cfg, str(model), lambda _: Machines(device, 2))
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_what_fits_is_one_line_with_its_peak(model: Path, caplog: pytest.LogCaptureFixture):
    ((level, line),) = logged(recipe(model), model, caplog, 80)
    assert level == "INFO"
    assert line.startswith("memory on GPUs, planned for H100 of 80 GB: trainer ")
    assert all(part in line for part in ("weights", "optimizer", "activations", "most at:", "; generator ", "cache"))
    assert "\n" not in line


def test_what_does_not_fit_is_a_warning_with_what_would(model: Path, caplog: pytest.LogCaptureFixture):
    """In the order of what costs least: recomputed activations, then shorter packs."""
    warnings = logged(recipe(model), model, caplog, 1.64)
    (level, line), (_, engine) = warnings
    assert level == "WARNING"
    assert line.startswith("the trainer may run out of memory: planned are 1.55 GB in each of 1 process(es) (weights")
    assert f"of this H100 {readable(1.64 * GB * 0.94)} can be used" in line
    assert line.endswith("the trainer fits with training.gradient_checkpointing: 1.5 GB")
    # The driver's part and the engine's margin leave nothing for keys and values.
    assert engine.startswith("the generator may run out of memory")
    assert "fits with none of: fewer generator.slots" in engine
    (_, shorter), _ = logged(recipe(model), model, caplog, 1.617)
    assert shorter.endswith("the trainer fits with training.gradient_checkpointing and training.seq_len 2048: 1.5 GB")


def test_slots_that_leave_room_for_the_cache_are_suggested(model: Path):
    """The logits of a million slots take more than the cache."""
    cfg = recipe(model, generator={"slots": 1_000_000, "max_seq_len": 512})
    machines = Machines(replace(DEVICES["L4"], memory=3.45 * GB), 1)
    config = model_config(model)
    remedy = engine_remedy(cfg, config, 100_000, machines)
    assert remedy.startswith("the generator fits with generator.slots ")
    slots = int(remedy.split()[5].rstrip(":"))
    assert slots < 1_000_000
    device = machines.device
    sequences = [
        engine_memory(config, 100_000, cfg.generator.model_copy(update={"slots": number}), 1, device).sequences
        for number in (2 * slots, slots)
    ]
    assert sequences[0] < 2 <= sequences[1]


def test_a_run_without_gpus_is_not_planned(model: Path, caplog: pytest.LogCaptureFixture):
    assert logged(recipe(model, services={}), model, caplog, 80) == []


def test_what_cannot_be_planned_is_one_line(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    ((level, line),) = logged(recipe(model), tmp_path / "nothing", caplog, 80)
    assert level == "INFO"
    assert line.startswith("memory on GPUs is not planned: ")
    assert "\n" not in line
    caplog.clear()
    cfg = recipe(model).model_copy(update={"cluster": recipe(model).cluster.model_copy(update={"hosts": "node1:1"})})
    with caplog.at_level(logging.INFO):
        log_plan(cfg, str(model))
    assert "is not planned: they are on cluster.hosts: try forge plan CONFIG --gpus 8xH100" in caplog.text


def test_several_policies_are_planned(model: Path, caplog: pytest.LogCaptureFixture):
    placed_on_gpu = {"with_gpus": True}
    values = {"model": str(model), "dataset": {"path": Rows(ROWS)}, "services": GPUS}
    values["models"] = {"rival": {"trains": True, "generator": placed_on_gpu, "trainer": placed_on_gpu}}
    values["episode"] = {"agent": {"function": "apps.selfplay.games:auction"}}
    ((level, line),) = logged(build(SeveralPoliciesConfig, values), model, caplog, 80)
    assert level == "INFO"
    for name in ("trainer", "models.rival.trainer", "models.rival.generator"):
        assert f"{name} " in line


def driver(folder: Path, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in the place of the driver's, which prints what a machine's would."""
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\nprintf "{answer}\\n"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.processes
def test_a_run_plans_itself_before_its_first_process(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    driver(tmp_path, "NVIDIA L4, 23034\nNVIDIA L4, 23034", monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    cfg = recipe(model, run={"name": "x", "root": str(tmp_path)}, eval={"problems": 0}, grpo={"max_tokens": 64})
    with caplog.at_level(logging.INFO):
        *_, record = prepare(cfg, Start())
    record.close()
    assert "memory on GPUs, planned for L4 of 24.2 GB: trainer " in caplog.text


@pytest.mark.processes
@pytest.mark.parametrize(
    ("visible", "answer", "machines"),
    [
        ("0,1", "NVIDIA H100 80GB HBM3, 81559\nNVIDIA H100 80GB HBM3, 81559", ("H100", 81559, 2)),
        ("1", "NVIDIA A100-SXM4-40GB, 40960", ("A100-40", 40960, 1)),
        ("0,1", "NVIDIA L4, 23034\nQuadro 9, 8192", ("Quadro 9", 8192, 2)),
        ("MIG-4", "NVIDIA H100 80GB HBM3, 81559", "they are parts of a GPU"),
        ("0", "", "nvidia-smi failed"),
    ],
)
def test_the_gpus_of_this_machine(
    visible: str, answer: str, machines: object, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    driver(tmp_path, answer, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if isinstance(machines, str):
        with pytest.raises(ValueError, match=machines):
            gpus_here(recipe(model))
        return
    here = gpus_here(recipe(model))
    assert (here.device.name, here.device.memory / start.MIB, here.count) == machines


def test_cards_by_the_names_of_their_driver():
    names = {
        ("NVIDIA H100 80GB HBM3", 80): "H100",
        ("NVIDIA H200", 141): "H200",
        ("NVIDIA A100-SXM4-80GB", 80): "A100",
        ("NVIDIA A100-PCIE-40GB", 40): "A100-40",
        ("NVIDIA GeForce RTX 4090", 24): "RTX4090",
        ("NVIDIA A10G", 23): "A10",
        ("NVIDIA L40S", 46): "L40S",
        ("Tesla T4", 15): "Tesla T4",
    }
    assert {key: device_of(key[0], key[1] * GB).name for key in names} == names
    assert device_of("Tesla T4", 15 * GB).tflops == 0


def test_divisions_are_suggested_where_ranks_alone_do_not_fit(capsys: pytest.CaptureFixture[str]):
    """A sequence of 131,072 tokens is too long for one GPU however the weights are divided."""
    words = ["--model", "meta-llama/Llama-3.1-8B-Instruct", "--training.seq_len", "131072"]
    words += ["--dataset.max_tokens", "131072", "--services.trainer.procs", "8"]
    with pytest.raises(SystemExit):
        main(["plan", "apps/sft/qwen3_8b.yaml", "--gpus", "8xA100-40", *words])
    text = capsys.readouterr().out
    assert "note: the trainer fits with parallelism." in text or "fits with services.trainer.procs 16 and" in text


def test_the_longest_packs_and_all_gpus_are_counted():
    _, plan = planned("apps/sft/qwen3_8b.yaml", ["--services.trainer.gpus_per_proc", "2"], "4xH200")
    assert plan.devices == 4
    assert any(note.startswith("training.seq_len up to ") for note in plan.notes)
