"""Of a trainer on several hosts each has a whole copy, unless a degree is set; a generator is within one host."""

from forge.config import read
from forge.recipes.rl_config import RLConfig
from tests.forge_cluster.machines import ROOT

CONFIG = ROOT / "tests/forge_cluster/tiny.yaml"


def layout(*overrides: tuple[str, str]):
    cfg = read(RLConfig, CONFIG, [("services.trainer.procs", "8"), *overrides])
    chosen = cfg.layout("trainer").over(8)
    return chosen.data_parallel_replicate_degree, chosen.data_parallel_shard_degree, chosen.tensor_parallel_degree


def test_default_parallel_layout_keeps_shards_within_hosts():
    assert layout() == (2, 4, 1)
    assert layout(("services.trainer.hosts", "4")) == (4, 2, 1)
    assert layout(("services.trainer.hosts", "1")) == (1, 8, 1)
    assert layout(("parallelism.data_parallel_shard_degree", "8")) == (1, 8, 1)
    assert layout(("parallelism.data_parallel_replicate_degree", "4")) == (4, 2, 1)
    assert layout(("parallelism.tensor_parallel_degree", "2")) == (2, 2, 2)


def test_critic_ignores_expert_parallel_degree():
    overrides = [("trainer.backend", "titan"), ("parallelism.expert_parallel_degree", "4")]
    cfg = read(RLConfig, CONFIG, [("services.trainer.procs", "8"), *overrides])
    assert cfg.layout("trainer").expert_parallel_degree == 4
    assert cfg.layout("critic").over(1).expert_parallel_degree == 1
