"""`forge.util.ops` of torchforge."""

from __future__ import annotations

from torch import Tensor


def compute_logprobs(logits: Tensor, input_ids: Tensor, temperature: float = 1.0, align: bool = True) -> Tensor:
    """Log-probabilities of tokens in float32.

    Args:
        logits: [rows, length, vocabulary]
        input_ids: [rows, tokens]
        temperature: of the distribution.
        align: the tokens are the last ones of the sequence whose logits these are, so that the logits before each
            predict it; false: logits [rows, tokens, vocabulary], each for the token at the same place.

    Returns:
        [rows, tokens]
    """
    count = input_ids.shape[1]
    if align:
        logits = logits[:, -count - 1 : -1].to(input_ids.device)
    # In float32 before the sum over the vocabulary, which bfloat16 would round to three digits.
    scores = (logits / temperature).float().log_softmax(-1)
    return scores.gather(-1, input_ids.long().unsqueeze(-1)).squeeze(-1)
