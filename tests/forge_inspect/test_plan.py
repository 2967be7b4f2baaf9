"""Plans against what trainers really hold, and what `forge plan` says of the recipes."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file

from benchmarks.planned_memory import (
    CASES,
    EXPERT,
    RECOMPUTED,
    SEQ_LEN,
    TITAN,
    Case,
    measure,
    measured_peak,
    plan,
    write_model,
)
from forge.cli import main
from forge.engines.settings import EngineSettings
from forge.system.devices import type_of
from forge.training.settings import OptimizerSettings, Parallelism, PassSettings
from forge_inspect.cli.plan import planned
from forge_inspect.plan.components import make_plan
from forge_inspect.plan.devices import DEVICES, Device, Machines, parse_machines
from forge_inspect.plan.generation import engine_memory
from forge_inspect.plan.memory import trainer_memory
from forge_inspect.plan.others import count_elements, scoring_memory
from forge_inspect.plan.passes import run_passes
from forge_inspect.plan.shapes import PUBLIC, shape_folder
from forge_inspect.plan.text import plan_lines
from forge_inspect.plan.times import DecodingCost, Work, decoding_cost, generation_seconds, training_seconds
from forge_inspect.plan.trainers import MARGIN, full_batch, weighted_scores

APPS = Path(__file__).parents[2] / "apps"
CPU = Device("CPU", 64e9, 0.0, 0.0, 0.0, 0.0, "cpu")
ALONE = [case for case in CASES if case.ranks == 1]
SHARED = [Case(ranks=2, passes=RECOMPUTED, updates=2), Case(ranks=2, layout={"tensor_parallel_degree": 2}, updates=2)]
CLOSE = 0.02  # of all cases of the benchmark that have one process
NEAR = 0.1  # of those with several


@pytest.mark.full
@pytest.mark.parametrize("case", ALONE, ids=str)
def test_the_plan_is_what_one_process_holds(case: Case, tmp_path: Path):
    model = write_model(case, tmp_path / "model")
    assert plan(case, model) == pytest.approx(measure(case, model, tmp_path), rel=CLOSE)


def test_the_plan_is_what_two_micro_batches_hold(tmp_path: Path):
    case = Case(updates=2)
    model = write_model(case, tmp_path / "model")
    assert plan(case, model) == pytest.approx(measure(case, model, tmp_path), rel=CLOSE)


@pytest.mark.processes
@pytest.mark.parametrize("case", SHARED, ids=str)
def test_the_plan_is_near_what_ranks_hold(case: Case, tmp_path: Path):
    model = write_model(case, tmp_path / "model")
    planned_bytes = plan(case, model)
    measured = measure(case, model, tmp_path)
    assert planned_bytes <= measured * (1 + NEAR)
    # On a busy machine gloo's threads hold what they sum, and its copy, until they have had their turn.
    elements = sum(weight.nbytes for weight in load_file(model / "model.safetensors").values()) // 4
    assert measured <= planned_bytes * (1 + NEAR) + 2 * 4 * elements


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed (extra titan)")
@pytest.mark.parametrize("case", TITAN, ids=str)
def test_the_plan_is_near_what_ranks_with_divided_experts_hold(case: Case, tmp_path: Path):
    model = write_model(case, tmp_path / "model")
    assert plan(case, model) == pytest.approx(measure(case, model, tmp_path), rel=NEAR)


def test_divided_experts_are_gathered_in_parts(tmp_path: Path):
    """Weights and state of a rank are the same; what is gathered of a layer is less, in passes and in gradients."""
    case = Case("Qwen3Moe", ranks=4, backend="titan", passes=RECOMPUTED)
    model = write_model(case, tmp_path / "model")
    passes = {
        degree: run_passes(
            model,
            full_batch(SEQ_LEN, 256, 4),
            weighted_scores,
            PassSettings(seq_len=SEQ_LEN, **RECOMPUTED),
            parallelism=Parallelism(expert_parallel_degree=degree),
            world_size=4,
            backend="titan",
        )
        for degree in (1, 2, 4)
    }
    assert len({found.elements for found in passes.values()}) == 1
    memory = {
        degree: trainer_memory(found, PassSettings(**RECOMPUTED), OptimizerSettings(), shards=4)
        for degree, found in passes.items()
    }
    assert len({(rank.weights, rank.optimizer) for rank in memory.values()}) == 1
    assert memory[1].total > memory[2].total > memory[4].total
    # Of a layer's experts, whose gate and up projection are one matrix of 2 * 128 rows.
    layer = 8 * 3 * 128 * 192
    assert memory[1].gathered - memory[4].gathered >= 2 * 4 * layer * 3 / 4
    with pytest.raises(ValueError, match="num_experts = 8 is not a multiple"):
        plan(Case("Qwen3Moe", ranks=3, backend="titan", layout={"expert_parallel_degree": 3}), model)


def test_divided_experts_are_a_remedy(tmp_path: Path):
    """One head, which context parallelism cannot divide, and experts that are nearly the whole model."""
    shape = {"num_attention_heads": 1, "num_key_value_heads": 1, "moe_intermediate_size": 4096, "num_hidden_layers": 2}
    model = write_model(Case("Qwen3Moe", shape=shape), tmp_path / "model")
    words = ["--model", str(model), "--from_scratch", "null", "--training.gradient_checkpointing", "true"]
    words += ["--services.trainer.procs", "2", "--services.trainer.with_gpus", "true", "--training.seq_len", "512"]
    cfg, _ = planned("apps/sft/tiny.yaml", words, "2xH100")
    divided = cfg.model_copy(
        update={
            "trainer": cfg.trainer.model_copy(update={"backend": "titan"}),
            "parallelism": cfg.parallelism.model_copy(update=EXPERT),
        }
    )
    machines = Machines(DEVICES["H100"], 2)
    needed = make_plan(divided, model, "mixture", machines).components[0].total
    whole = make_plan(cfg, model, "mixture", machines).components[0].total
    assert needed < whole * 0.99
    tight = Machines(replace(DEVICES["H100"], memory=(needed + whole) / 2 / (1 - MARGIN)), 2)
    notes = make_plan(cfg, model, "mixture", tight).notes
    expected = "the trainer fits with parallelism.expert_parallel_degree 2 and trainer.backend titan"
    assert any(note.startswith(expected) for note in notes), notes


def test_more_of_anything_is_never_less_memory(tmp_path: Path):
    model = write_model(Case(), tmp_path / "model")
    base = Case(updates=2)
    more = [replace(base, shape={"num_hidden_layers": 8}), replace(base, shape={"vocab_size": 8192})]
    assert all(plan(case, write_model(case, tmp_path / str(n))) > plan(base, model) for n, case in enumerate(more))
    recomputed = plan(replace(base, passes=RECOMPUTED), model)
    assert recomputed < plan(base, model)
    assert plan(replace(base, passes=RECOMPUTED, lora=4), model) < recomputed


def test_a_plan_leaves_no_process_group_and_no_device(tmp_path: Path):
    model = write_model(Case(), tmp_path / "model")
    run_passes(model, full_batch(SEQ_LEN, 128, 4), weighted_scores, PassSettings(seq_len=SEQ_LEN), world_size=4)
    assert not dist.is_initialized()
    assert type_of(torch.device("meta")) == "meta"
    # Attention has its kernels again.
    query = torch.randn(1, 2, 3, 4)
    assert torch.nn.functional.scaled_dot_product_attention(query, query, query).shape == query.shape


GPU_RECIPES = [path for path in sorted(APPS.glob("*/*.yaml")) if "with_gpus: true" in path.read_text()]


@pytest.mark.parametrize("recipe", GPU_RECIPES)
def test_every_recipe_for_gpus_fits_them(recipe: Path):
    if "collect:" in recipe.read_text():
        pytest.skip("it collects answers, and trains nothing")
    gpus = "32xH100" if "32b_grpo" in recipe.stem else "8xH100"
    _, plan_of_recipe = planned(str(recipe), [], gpus)
    assert plan_of_recipe.fits, "\n".join(plan_lines(plan_of_recipe))
    assert plan_of_recipe.step_seconds > 0


def test_what_does_not_fit_is_said_with_what_would(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "apps/sft/qwen3_8b.yaml", "--gpus", "2xA100-40"])
    assert ended.value.code == 1
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text
    assert "note: the trainer fits with services.trainer.procs 8" in text
    with pytest.raises(SystemExit):
        main(["plan", "apps/sft/qwen3_8b.yaml", "--gpus", "8xH100", "--training.gradient_checkpointing", "false"])
    assert "note: the trainer fits with training.gradient_checkpointing" in capsys.readouterr().out
    main(["plan", "apps/sft/qwen3_8b.yaml", "--gpus", "8xH200", "--price", "3"])
    assert "dollars" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["apps/sft/qwen3_8b.yaml", "--gpus", "8xT800"], "write a number and a device, as 8xH100"),
        (["apps/sft/qwen3_8b.yaml", "--gpus"], "--gpus needs a value"),
        (["apps/sft/qwen3_8b.yaml", "--price", "two"], "--price"),
        (["apps/sft/qwen3_8b.yaml", "--training.seqlen", "5"], "did you mean"),
        (
            ["apps/sft/qwen3_8b.yaml", "--services.trainer.procs", "6", "--parallelism.tensor_parallel_degree", "3"],
            "= 3",
        ),
        (["apps/sft/qwen3_8b.yaml", "--model", "nobody/nothing"], "known without it are"),
        (["apps/sft/no.yaml"], "no.yaml"),
        (["apps/weaver/qwen3_8b.yaml"], "collects answers"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words])
    assert str(ended.value.code).startswith("error: ")
    assert message in str(ended.value.code)
    assert "\n" not in str(ended.value.code)


def test_machines():
    assert parse_machines("8xh100", CPU) == Machines(DEVICES["H100"], 8)
    assert parse_machines("A100-40", CPU) == Machines(DEVICES["A100-40"], 1)
    assert parse_machines("CPU", CPU) == Machines(CPU, 1)
    for text in ("0xH100", "8*H100", "", "8x"):
        with pytest.raises(ValueError, match="known are"):
            parse_machines(text, CPU)


def test_shapes_of_public_models_have_their_parameters(tmp_path: Path):
    """The numbers that their cards name, in billions."""
    from transformers import AutoConfig, AutoModelForCausalLM

    cards = {"Qwen/Qwen3-0.6B": 0.6, "Qwen/Qwen3-8B": 8.2, "Qwen/Qwen3-32B": 32.8, "Qwen/Qwen3-30B-A3B": 30.5}
    cards |= {"Qwen/Qwen3-14B": 14.8, "meta-llama/Llama-3.1-8B": 8.0, "meta-llama/Llama-3.1-70B-Instruct": 70.6}
    assert cards.keys() <= PUBLIC.keys()
    for name, billions in cards.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shape_folder(name, tmp_path)))
        assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01), name


def test_the_cache_takes_what_two_versions_of_the_weights_leave(tmp_path: Path):
    from transformers import AutoConfig

    from forge.engines.settings import EngineSettings

    config = AutoConfig.from_pretrained(shape_folder("Qwen/Qwen3-8B", tmp_path))
    settings = EngineSettings(dtype="bfloat16", slots=256, max_seq_len=4096)
    small = engine_memory(config, 8_190_735_360, settings, 1, DEVICES["H100"])
    assert small.total == pytest.approx(DEVICES["H100"].memory - 1.5e9, rel=0.001)
    bounded = engine_memory(config, 8_190_735_360, settings.model_copy(update={"cache_gb": 10.0}), 1, DEVICES["H100"])
    assert bounded.cache == 10e9
    assert bounded.sequences < small.sequences
    assert engine_memory(config, 8_190_735_360, settings, 1, DEVICES["L4"]).sequences == 0


def test_copies_on_several_hosts_are_told_to_share(capsys: pytest.CaptureFixture[str]):
    """Shards stay within a host: two hosts have two copies of what one of them has no room for."""
    with pytest.raises(SystemExit):
        main(
            ["plan", "apps/weaver/qwen3_32b_grpo.yaml", "--gpus=32xH100", "--parallelism.data_parallel_shard_degree=-1"]
        )
    assert "the trainer fits with parallelism.data_parallel_shard_degree 16: 48.4 GB" in capsys.readouterr().out


def test_quantised_weights_are_smaller(tmp_path: Path):
    from transformers import AutoConfig

    from forge.engines.settings import EngineSettings

    config = AutoConfig.from_pretrained(shape_folder("Qwen/Qwen3-8B", tmp_path))
    settings = EngineSettings(dtype="bfloat16", slots=128, max_seq_len=1024)
    plain = engine_memory(config, 8_190_735_360, settings, 1, DEVICES["L4"])
    small = engine_memory(config, 8_190_735_360, settings.model_copy(update={"quantization": "int8"}), 1, DEVICES["L4"])
    # Embeddings and head stay: 151,936 tokens of 4,096 each.
    rest = 2 * 151_936 * 4096
    assert small.weights == small.update == pytest.approx(8_190_735_360 - rest + 2 * rest, rel=0.002)
    assert plain.sequences == 0
    assert small.sequences > 0


def test_seconds_follow_the_roofline(tmp_path: Path):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(shape_folder("Qwen/Qwen3-8B", tmp_path))
    work = Work(256, 256.0, 1024.0)
    device = DEVICES["H100"]
    one = training_seconds(config, work, device, 1, False)
    # 6 * parameters * tokens without the head of prompts, and attention on top.
    assert one == pytest.approx(6 * 7.5e9 * 256 * 1280 / (989e12 * 0.33), rel=0.1)
    assert training_seconds(config, work, device, 4, True) == pytest.approx(one / 3, rel=1e-6)
    settings = {"slots": 64, "weights": 16.4e9, "token_bytes": 147456.0, "decoding": DecodingCost(0.0, 2e12)}
    alone = generation_seconds(config, work, device, replicas=1, **settings)
    assert generation_seconds(config, work, device, replicas=4, **settings) == pytest.approx(alone / 4, rel=0.01)


def test_decode_steps_of_the_embedded_engine_are_those_of_a_card(tmp_path: Path):
    """Measured on an H100: Qwen3-0.6B's shape, 8 and 256 rows of 160 tokens; 3.2 and 9.5 ms, 14.8 without graphs."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(shape_folder("Qwen/Qwen3-0.6B", tmp_path))
    weights, row = 1.2e9, 160 * 114_688
    captured, launched = (
        decoding_cost(config, EngineSettings(cuda_graphs=graphs), DEVICES["H100"]) for graphs in (None, False)
    )
    assert captured.seconds(weights + 8 * row) == pytest.approx(3.2e-3, rel=0.05)
    assert captured.seconds(weights + 256 * row) == pytest.approx(9.5e-3, rel=0.05)
    assert launched.seconds(weights + 8 * row) == pytest.approx(14e-3, rel=0.1)


def test_a_mixture_of_a_folder_is_planned(tmp_path: Path):
    """With the whole of what the command does, from a folder that has no weights."""
    case = Case("Qwen3Moe", shape={"num_hidden_layers": 2})
    model = write_model(case, tmp_path / "model")
    (model / "model.safetensors").unlink()
    _, result = planned("apps/sft/tiny.yaml", ["--model", str(model), "--from_scratch", "null"], "cpu")
    assert result.components[0].parts["activations"] > 0
    assert result.fits


def small_scorer(folder: Path, kind: str) -> Path:
    """The config.json of a small sequence classifier."""
    from transformers import LlamaConfig, ModernBertConfig, Qwen3Config

    shape = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 4096}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 3, "sep_token_id": 4}
    configs = {
        "qwen3": lambda: Qwen3Config(num_key_value_heads=2, head_dim=64, intermediate_size=512, **shape, **ids),
        "llama": lambda: LlamaConfig(intermediate_size=512, **shape, **ids),
        "modernbert": lambda: ModernBertConfig(intermediate_size=384, **shape, **ids),
    }
    config = configs[kind]()
    config.num_labels = 1
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["qwen3", "llama", "modernbert"])
def test_the_plan_of_a_reward_model_is_what_it_holds(kind: str, tmp_path: Path):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from forge_verifiers.settings import RewardModelSettings

    folder = small_scorer(tmp_path / kind, kind)
    weights, activations = scoring_memory(RewardModelSettings(path=str(folder), batch_tokens=4096), folder, 512)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(folder)).eval()
    assert weights == sum(weight.nbytes for weight in model.parameters())
    ids = torch.randint(5, 4096, (8, 512))

    @torch.inference_mode()
    def score() -> None:
        model(input_ids=ids, attention_mask=torch.ones_like(ids))

    score()
    assert activations == pytest.approx(measured_peak(score), rel=CLOSE)


def test_each_component_is_planned_by_its_own_model(tmp_path: Path):
    words = ["--algorithm", "ppo", "--critic.model", "Qwen/Qwen3-8B", "--grpo.beta", "0.1"]
    words += ["--grpo.reference", "Qwen/Qwen3-4B", "--services.ref_model.with_gpus", "true"]
    words += ["--services.critic.with_gpus", "true"]
    _, small = planned("apps/selfplay/debate.yaml", words, "16xH100")
    parts = {component.name: component.parts for component in small.components}
    assert parts.keys() == {
        *("trainer", "critic", "ref_model", "generator", "models.judge.generator"),
        *("models.rival.trainer", "models.rival.generator", "models.rival.critic"),
    }
    shapes = {name: shape_folder(f"Qwen/Qwen3-{name}", tmp_path) for name in ("0.6B", "4B", "8B")}
    elements = {name: count_elements(folder) for name, folder in shapes.items()}
    for part, model, bytes_each in (
        ("trainer", "0.6B", 4),
        ("models.rival.trainer", "0.6B", 4),
        ("models.judge.generator", "4B", 2),
        ("ref_model", "4B", 4),
        ("critic", "8B", 4),
        ("models.rival.critic", "8B", 4),
    ):
        # A critic has one row in place of a vocabulary's head.
        assert parts[part]["weights"] == pytest.approx(bytes_each * elements[model], rel=0.1), part
    own_critic, _ = (planned("apps/selfplay/debate.yaml", words[:2], "16xH100")[1].components[n] for n in (1, 0))
    assert own_critic.name == "critic"
    assert own_critic.parts["weights"] == pytest.approx(4 * elements["0.6B"], rel=0.3)


@pytest.mark.slow
def test_reward_models_that_do_not_fit_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    models = [{"path": "Qwen/Qwen3-8B", "name": name, "dtype": "bfloat16"} for name in "abcdefg"]
    words = ["--reward.verifiers", yaml.safe_dump({"reward_models": models}, default_flow_style=True, width=10**6)]
    words += ["--services.reward.with_gpus", "true"]
    _, seven = planned("apps/grpo/qwen3_1_7b.yaml", words, "3xH100")
    rewards = {component.name: component for component in seven.components}["reward"]
    assert rewards.parts["weights"] == pytest.approx(7 * 2 * 7.57e9, rel=0.01)  # without the head
    assert not rewards.fits
    with pytest.raises(SystemExit):
        main(["plan", "apps/grpo/qwen3_1_7b.yaml", "--gpus", "3xH100", *words])
    assert "note: the reward fits with a lower batch_tokens" in capsys.readouterr().out
