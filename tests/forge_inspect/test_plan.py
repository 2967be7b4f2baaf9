"""Plans against what trainers really hold, and what `forge plan` says of the recipes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

from benchmarks.planned_memory import (
    CASES,
    RECOMPUTED,
    Case,
    measure,
    measured_peak,
    plan,
    write_model,
)
from forge.cli import main
from forge_inspect.cli.plan import plan_file
from forge_inspect.plan.components import count_elements, scoring_memory
from forge_inspect.plan.devices import DEVICES, PUBLIC, Machines, parse_machines, shape_folder
from forge_inspect.plan.meter import measure_block
from forge_inspect.plan.plan import plan_lines

APPS = Path(__file__).parents[2] / "apps"
CPU = Machines("CPU", 64e9, 1, "cpu")
ALONE = [case for case in CASES if case.ranks == 1]
SHARED = [Case(ranks=2, passes=RECOMPUTED, updates=2), Case(ranks=2, layout={"tensor_parallel_degree": 2}, updates=2)]
CLOSE = 0.02  # of all cases of the benchmark that have one process
NEAR = 0.1  # of those with several


@pytest.mark.full
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (n % 2)) for n, case in enumerate(ALONE)], ids=str
)
def test_planned_memory_matches_measured_memory_of_one_process(case: Case, tmp_path: Path):
    model = write_model(case, tmp_path / "model")
    assert plan(case, model) == pytest.approx(measure(case, model, tmp_path), rel=CLOSE)


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("case", SHARED, ids=str)
def test_planned_memory_is_close_to_measured_memory_of_ranks(case: Case, tmp_path: Path):
    model = write_model(case, tmp_path / "model")
    planned_bytes = plan(case, model)
    measured = measure(case, model, tmp_path)
    assert planned_bytes <= measured * (1 + NEAR)
    # On a busy machine gloo's threads hold what they sum, and its copy, until they have had their turn.
    elements = sum(weight.nbytes for weight in load_file(model / "model.safetensors").values()) // 4
    assert measured <= planned_bytes * (1 + NEAR) + 2 * 4 * elements


def test_planned_memory_never_shrinks_with_model_size(tmp_path: Path):
    model = write_model(Case(), tmp_path / "model")
    base = Case(updates=2)
    more = [replace(base, shape={"num_hidden_layers": 8}), replace(base, shape={"vocab_size": 8192})]
    assert all(plan(case, write_model(case, tmp_path / str(n))) > plan(base, model) for n, case in enumerate(more))
    recomputed = plan(replace(base, passes=RECOMPUTED), model)
    assert recomputed < plan(base, model)
    assert plan(replace(base, passes=RECOMPUTED, lora=4), model) < recomputed


GPU_RECIPES = [path for path in sorted(APPS.glob("*/*.yaml")) if "with_gpus: true" in path.read_text()]


@pytest.mark.full
@pytest.mark.parametrize("recipe", GPU_RECIPES)
def test_planned_memory_of_gpu_recipes_fits_h100_nodes(recipe: Path):
    if "collect:" in recipe.read_text():
        pytest.skip("it collects answers, and trains nothing")
    gpus = "32xH100" if "32b_grpo" in recipe.stem else "8xH100"
    _, plan_of_recipe = plan_file(str(recipe), [], gpus)
    assert plan_of_recipe.fits, "\n".join(plan_lines(plan_of_recipe))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_5_moe_text", "gemma4_text", "nemotron_h"])
def test_colocated_adapters_of_published_sizes_fit_one_gpu(kind: str, tmp_path: Path):
    layers = {"num_hidden_layers": 24, "num_local_experts": 32} if kind == "gpt_oss" else {}  # of the 20B
    CONFIG_MAPPING[kind](**layers).save_pretrained(tmp_path)
    _, planned = plan_file(str(APPS / "grpo/one_h100.yaml"), ["--model", str(tmp_path)], "1xH100")
    assert planned.fits, "\n".join(plan_lines(planned))

    # A released engine holds one version of the weights.
    assert all("next version" not in component.parts for component in planned.components)


@pytest.mark.full
def test_memory_plan_beyond_gpu_names_settings_that_fit(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "apps/sft/qwen3_8b.yaml", "--gpus", "2xA100-40"])
    assert ended.value.code == 1
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text
    assert "note: the trainer fits with services.trainer.procs 8" in text
    with pytest.raises(SystemExit):
        main(["plan", "apps/sft/qwen3_8b.yaml", "--gpus", "8xH100", "--training.gradient_checkpointing", "false"])
    assert "note: the trainer fits with training.gradient_checkpointing" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "gpus", "changes", "note"),
    [
        ("grpo/qwen3_1_7b.yaml", "8xH100", "", "6 of the 8 GPUs are not used: raise services.trainer.procs"),
        ("grpo/qwen3_1_7b.yaml", "2xH100", "", None),
        ("grpo/tiny.yaml", "H100", "--model Qwen/Qwen3-0.6B", "1 of the 1 GPUs are not used"),
        ("grpo/qwen3_1_7b.yaml", "A100", "--services.trainer.with_gpus false", None),
        ("sft/qwen3_8b.yaml", "16xH100", "", "14 of the 16 GPUs"),
        (
            *("grpo/qwen3_1_7b.yaml", "2xH100"),
            "--services.trainer.with_gpus false --services.generator.num_replicas 4",
            "4 GPUs are asked for, and there are 2",
        ),
        ("grpo/qwen3_1_7b.yaml", "cpu", "", "2 GPUs are asked for, and there are 0"),
    ],
)
def test_memory_plan_reports_unused_gpus(config: str, gpus: str, changes: str, note: str | None):
    _, planned = plan_file(f"apps/{config}", changes.split(), gpus)
    found = [text for text in planned.notes if "GPUs are" in text]
    assert [text[: len(note or "")] for text in found] == ([] if note is None else [note])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["apps/sft/qwen3_8b.yaml", "--gpus", "8xT800"], "must be a number and a device, such as 8xH100"),
        (["apps/sft/qwen3_8b.yaml", "--gpus"], "--gpus: expected one argument"),
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
def test_invalid_forge_plan_input_raises_one_line_error(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words])
    assert str(ended.value.code).startswith("error: ")
    assert message in str(ended.value.code)
    assert "\n" not in str(ended.value.code)


def test_plan_machine_descriptions_such_as_8xh100_are_parsed():
    assert parse_machines("8xh100", CPU) == Machines("H100", DEVICES["H100"], 8)
    assert parse_machines("A100-40", CPU) == Machines("A100-40", DEVICES["A100-40"], 1)
    assert parse_machines("CPU", CPU) == CPU
    for text in ("0xH100", "8*H100", "", "8x"):
        with pytest.raises(ValueError, match="known are"):
            parse_machines(text, CPU)


def test_public_model_shapes_have_published_parameter_counts(tmp_path: Path):
    """The numbers that their cards name, in billions."""
    from transformers import AutoConfig, AutoModelForCausalLM

    cards = {"Qwen/Qwen3-0.6B": 0.6, "Qwen/Qwen3-8B": 8.2, "Qwen/Qwen3-32B": 32.8, "Qwen/Qwen3-30B-A3B": 30.5}
    cards |= {"Qwen/Qwen3-14B": 14.8, "meta-llama/Llama-3.1-8B": 8.0, "meta-llama/Llama-3.1-70B-Instruct": 70.6}
    cards |= {"Qwen/Qwen2.5-0.5B": 0.494, "Qwen/Qwen2.5-1.5B-Instruct": 1.544, "Qwen/Qwen2.5-3B": 3.086}
    cards |= {"Qwen/Qwen2.5-Coder-7B-Instruct": 7.616, "Qwen/Qwen2.5-14B": 14.77, "Qwen/Qwen2.5-32B-Instruct": 32.76}
    cards |= {"Qwen/Qwen2.5-72B": 72.71, "mistralai/Mistral-7B-Instruct-v0.3": 7.248}
    cards |= {"mistralai/Mistral-Nemo-Instruct-2407": 12.25, "mistralai/Mistral-Small-24B-Instruct-2501": 23.57}
    assert cards.keys() <= PUBLIC.keys()
    for name, billions in cards.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shape_folder(name, tmp_path)))
        assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01), name


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
def test_planned_memory_matches_measured_reward_model_training(kind: str, tmp_path: Path):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from forge_verifiers.config import RewardModelSettings

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


@pytest.mark.full
def test_memory_plan_uses_the_configured_model_of_each_component(tmp_path: Path):
    words = ["--algorithm", "ppo", "--critic.model", "Qwen/Qwen3-8B", "--grpo.beta", "0.1"]
    words += ["--grpo.reference", "Qwen/Qwen3-4B", "--services.ref_model.with_gpus", "true"]
    words += ["--services.critic.with_gpus", "true"]
    _, small = plan_file("apps/selfplay/debate.yaml", words, "16xH100")
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
        # A critic has one row instead of a vocabulary's head.
        assert parts[part]["weights"] == pytest.approx(bytes_each * elements[model], rel=0.1), part
    own_critic, _ = (plan_file("apps/selfplay/debate.yaml", words[:2], "16xH100")[1].components[n] for n in (1, 0))
    assert own_critic.name == "critic"
    assert own_critic.parts["weights"] == pytest.approx(4 * elements["0.6B"], rel=0.3)


def test_attention_memory_estimate_uses_head_width_of_values():
    # DeepSeek's latent attention has values of another width than keys.
    query, value = torch.empty(1, 2, 5, 24, device="meta"), torch.empty(1, 2, 5, 16, device="meta")
    with measure_block({}):
        attended = torch.nn.functional.scaled_dot_product_attention(query, query, value)
    assert attended.shape == (1, 2, 5, 16)
