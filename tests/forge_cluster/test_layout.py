"""Of a trainer on several hosts each has a whole copy, unless a degree is set; a generator is within one host."""

import pytest

from forge.actors import Generator
from forge.config import read
from forge.recipes.rl_config import RLConfig
from forge.runtime.controller import Options
from tests.forge_cluster.machines import ROOT

CONFIG = ROOT / "tests/forge_cluster/tiny.yaml"


def layout(*overrides: tuple[str, str]):
    cfg = read(RLConfig, CONFIG, [("services.trainer.procs", "8"), *overrides])
    chosen = cfg.layout("trainer").over(8)
    return chosen.data_parallel_replicate_degree, chosen.data_parallel_shard_degree, chosen.tensor_parallel_degree


def test_shards_stay_within_hosts():
    assert layout() == (2, 4, 1)
    assert layout(("services.trainer.hosts", "4")) == (4, 2, 1)
    assert layout(("services.trainer.hosts", "1")) == (1, 8, 1)
    assert layout(("parallelism.data_parallel_shard_degree", "8")) == (1, 8, 1)
    assert layout(("parallelism.data_parallel_replicate_degree", "4")) == (4, 2, 1)
    assert layout(("parallelism.tensor_parallel_degree", "2")) == (2, 2, 2)


def test_the_trainer_alone_divides_experts():
    overrides = [("trainer.backend", "titan"), ("parallelism.expert_parallel_degree", "4")]
    cfg = read(RLConfig, CONFIG, [("services.trainer.procs", "8"), *overrides])
    assert cfg.layout("trainer").expert_parallel_degree == 4
    assert cfg.layout("critic").over(1).expert_parallel_degree == 1


def test_a_generator_over_several_devices_is_one_process_of_one_host():
    options, kwargs = Generator.place(Options(hosts=1, procs=8, with_gpus=True, num_replicas=16), {"engine": "vllm"})
    assert (options.procs, options.gpus_per_proc, options.hosts, options.num_replicas) == (1, 8, None, 16)
    assert kwargs["vllm"]["tensor_parallel_size"] == 8
    with pytest.raises(ValueError, match="is within one host"):
        Generator.place(Options(hosts=2, procs=8, with_gpus=True), {"engine": "vllm"})
