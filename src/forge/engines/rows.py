"""The state of the running batch's rows on the device, and the draw of their next tokens.

Each token is drawn by inverse transform sampling with its own uniform number: it depends on its row's logits and number
only, not on the rest of the batch.
"""

import torch
from torch import Tensor

from .graphs import Drawn
from .requests import RunningSample
from .restrictions import Restrictions
from .sampling import draw_tokens, draw_uniforms

MIN_TEMPERATURE = 1e-4  # below it, logits / temperature could overflow float32


class RowState:
    """Tensors of all rows, [rows] each or [rows, positions], so that a step has the same few operations for any rows.

    A row that has ended stays where it is until another sample gets it: the host may look at it some steps later.
    """

    def __init__(self, rows: int, longest: int, vocab: int, device: torch.device) -> None:
        self._device = device
        # `positions` is the row's last token, `ends` the last that it may draw.
        self.tokens, self.positions, self.ends = (torch.zeros(rows, dtype=torch.long, device=device) for _ in range(3))
        self.temperature = torch.ones(rows, device=device)
        self.greedy, self.running = (torch.zeros(rows, dtype=torch.bool, device=device) for _ in range(2))
        self.any_greedy = False  # whether a running row is
        self.stops = torch.full((rows, 1), -1, device=device)
        # By position, like the cache: the uniform numbers, and the tokens drawn with them.
        self.uniform, self.logprobs = (torch.zeros(rows, longest, device=device) for _ in range(2))
        self.drawn = torch.zeros(rows, longest, dtype=torch.long, device=device)
        self.restrictions = Restrictions(rows, vocab, device)

    def place(self, placed: dict[int, RunningSample]) -> None:
        """Set rows to the state of their new samples."""
        device = self._device
        requests = [row.request for row in placed.values()]
        samplings = [request.sampling for request in requests]

        # A row of stop tokens for each sample, padded to the longest.
        width = max(self.stops.shape[1], *(len(request.stops) for request in requests))
        if width > self.stops.shape[1]:
            self.stops = torch.nn.functional.pad(self.stops, (0, width - self.stops.shape[1]), value=-1)
        stops = [[*request.stops, *[-1] * (width - len(request.stops))] for request in requests]
        index = torch.tensor(list(placed), device=device)

        for state, values in (
            (self.tokens, [row.tokens[-1] for row in placed.values()]),
            (self.positions, [row.context for row in placed.values()]),
            (self.ends, [len(request.prompt) - 1 + request.limit for request in requests]),
            (self.temperature, [max(s.temperature, MIN_TEMPERATURE) if s.temperature else 1.0 for s in samplings]),
            (self.greedy, [s.temperature == 0 for s in samplings]),
            (self.running, [True for _ in requests]),
            (self.stops, stops),
        ):
            state[index] = torch.tensor(values, dtype=state.dtype, device=device)

        self.restrictions.place(index, placed)
        for i, row in placed.items():
            first = len(row.request.prompt) - 1
            limit = row.request.limit
            self.uniform[i, first : first + limit] = draw_uniforms(row.request.seed, row.sample, limit)

    def move(self, free: int, last: int) -> None:
        """Give row `free` the state of row `last`."""
        self.restrictions.move(free, last)
        by_row = (self.tokens, self.positions, self.ends, self.temperature, self.greedy, self.running, self.stops)
        for state in (*by_row, self.uniform, self.logprobs, self.drawn):
            state[free] = state[last]

    def draw(self, logits: Tensor, active: Tensor | None = None, policy: Tensor | None = None) -> Drawn:
        """Draw a token for each of the first rows, logits (B, V), and record it at the row's position, which moves on.

        Args:
            active: (B,), the rows that move at all; None: all.
            policy: see `Restrictions.record`.
        """
        rows = len(logits)
        positions, running = self.positions[:rows], self.running[:rows]
        columns = positions[:, None]
        uniform = self.uniform[:rows].gather(1, columns)[:, 0]
        tokens, logprobs = draw_tokens(logits, uniform, self.greedy[:rows] if self.any_greedy else None)
        self.restrictions.record(logprobs, policy, tokens)
        self.tokens[:rows] = tokens
        self.drawn[:rows].scatter_(1, columns, tokens[:, None])
        self.logprobs[:rows].scatter_(1, columns, logprobs[:, None])
        positions += running if active is None else active.logical_and(running)
        running &= positions < self.ends[:rows]
        running &= (self.stops[:rows] != tokens[:, None]).all(1)
        return Drawn(tokens, logprobs, positions.masked_fill(running, -1))
