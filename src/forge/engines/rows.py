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
    """State of all rows as tensors, (rows,) or (rows, positions) each, so that a step has the same operations for any
    rows.

    The position of a row that has ended stays the same until another sample gets the row.

    Args:
        rows: number of rows.
        longest: maximum number of positions of a row.
        vocab: number of tokens of the vocabulary.
    """

    def __init__(self, rows: int, longest: int, vocab: int, device: torch.device) -> None:
        self._device = device

        # `positions` is the position of the row's last token, `ends` of the last token that it may draw.
        self.tokens, self.positions, self.ends = (torch.zeros(rows, dtype=torch.long, device=device) for _ in range(3))
        self.temperature = torch.ones(rows, device=device)
        self.greedy, self.running = (torch.zeros(rows, dtype=torch.bool, device=device) for _ in range(2))
        self.any_greedy = False  # whether any running row is greedy
        self.stops = torch.full((rows, 1), -1, device=device)

        # By position, like the cache: the uniform numbers, and the tokens drawn with them.
        self.uniform, self.logprobs = (torch.zeros(rows, longest, device=device) for _ in range(2))
        self.drawn = torch.zeros(rows, longest, dtype=torch.long, device=device)
        self.restrictions = Restrictions(rows, vocab, device)

    def place(self, placed: dict[int, RunningSample]) -> None:
        """Set the state of rows that have new samples, by row index."""
        device = self._device
        requests = [row.request for row in placed.values()]
        samplings = [request.sampling for request in requests]

        # The stop tokens of each sample, padded to the longest list by -1, which is not a token.
        width = max(self.stops.shape[1], *(len(request.stops) for request in requests))
        if width > self.stops.shape[1]:
            self.stops = torch.nn.functional.pad(self.stops, (0, width - self.stops.shape[1]), value=-1)
        padded_stops = [[*request.stops, *[-1] * (width - len(request.stops))] for request in requests]

        index = torch.tensor(list(placed), device=device)
        for state, row_values in (
            (self.tokens, [row.tokens[-1] for row in placed.values()]),
            (self.positions, [row.context for row in placed.values()]),
            (self.ends, [len(request.prompt) - 1 + request.limit for request in requests]),
            (self.temperature, [max(s.temperature, MIN_TEMPERATURE) if s.temperature else 1.0 for s in samplings]),
            (self.greedy, [s.temperature == 0 for s in samplings]),
            (self.running, [True for _ in requests]),
            (self.stops, padded_stops),
        ):
            state[index] = torch.tensor(row_values, dtype=state.dtype, device=device)

        self.restrictions.place(index, placed)

        # The number at the position of a token draws the next token: the first is at the last token of the prompt.
        for i, row in placed.items():
            first = len(row.request.prompt) - 1
            limit = row.request.limit
            self.uniform[i, first : first + limit] = draw_uniforms(row.request.seed, row.sample, limit)

    def move(self, free: int, last: int) -> None:
        """Copy the state of row `last` to row `free`."""
        self.restrictions.move(free, last)
        by_row = (self.tokens, self.positions, self.ends, self.temperature, self.greedy, self.running, self.stops)
        for state in (*by_row, self.uniform, self.logprobs, self.drawn):
            state[free] = state[last]

    def draw(self, logits: Tensor, active: Tensor | None = None, policy: Tensor | None = None) -> Drawn:
        """Sample a token for each of the first B rows, record it at the row's position, and advance running rows by
        one.

        Args:
            logits: (B, V), after temperature, grammar, top-k and top-p.
            active: (B,), the rows that may move on; None: all.
            policy: the result of `Restrictions.policy`.
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

        # `positions` and `running` are views: these lines move the rows on, and end those at their limit or a stop.
        positions += running if active is None else active.logical_and(running)
        running &= positions < self.ends[:rows]
        running &= (self.stops[:rows] != tokens[:, None]).all(1)
        return Drawn(tokens, logprobs, positions.masked_fill(running, -1))
