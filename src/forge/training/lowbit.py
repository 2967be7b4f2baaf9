"""AdamW with state of 8 bits (Dettmers et al. 2021, arXiv 2110.02861). Imports torchao."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torchao.optim import AdamW8bit as Compiled

if TYPE_CHECKING:
    from collections.abc import Callable


class AdamW8bit(Compiled):
    """torchao's AdamW, which compiles its update; eager on a CPU, where compilation takes seconds for each shape."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update; eager on a CPU, where compiling takes longer than it gains."""
        on_cpu = all(p.device.type == "cpu" for group in self.param_groups for p in group["params"])
        with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
            return super().step(closure)
