"""Names of Meta's torchforge whose contents have another form here: `forge.util`, metric loggers and tracers.

    from forge.util.config import parse
    from forge.util.ops import compute_logprobs
    from forge.observability.metric_actors import get_or_create_metric_logger
    from forge.observability.perf_tracker import Tracer

`forge_compat.aliases` has the names of these modules, docs/howto/from_torchforge.md what stands for each here.
"""

from .distributed import get_world_size_and_rank
from .logging import get_logger, log_once, log_rank_zero
from .ops import compute_logprobs

__all__ = ["compute_logprobs", "get_logger", "get_world_size_and_rank", "log_once", "log_rank_zero"]
