"""The call forms of the public documents, and what losses say when something is missing."""

import pytest
import torch

from forge.losses import GRPOLoss, SimpleGRPOLoss
from forge.losses.reinforce_loss import ReinforceLoss


@pytest.mark.parametrize("loss_fn", [SimpleGRPOLoss(beta=0.1), ReinforceLoss(clip_ratio=0.2)])
@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.bool, torch.int64])
def test_documented_four_tensor_loss_call_has_no_gradient_outside_mask(
    loss_fn: torch.nn.Module, mask_dtype: torch.dtype
):
    torch.manual_seed(0)
    logprobs = -torch.rand(4, 7)
    logprobs.requires_grad_()
    padding_mask = (torch.arange(7) < torch.tensor([7, 3, 5, 1])[:, None]).to(mask_dtype)
    advantages = torch.randn(4, 7)
    loss = loss_fn(
        logprobs=logprobs,
        ref_logprobs=logprobs.detach() - 0.1,
        advantages=advantages,
        padding_mask=padding_mask,
    )
    assert loss.shape == ()
    loss.backward()
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad != 0, padding_mask.bool())


@pytest.mark.parametrize("loss_fn", [SimpleGRPOLoss(beta=0.1), ReinforceLoss(clip_ratio=0.2)])
def test_per_sequence_advantage_is_broadcast_to_tokens(loss_fn: torch.nn.Module):
    logprobs, mask, advantages = -torch.rand(3, 5), torch.ones(3, 5), torch.randn(3, 1)
    one, all_ = (loss_fn(logprobs, logprobs - 0.1, a, mask) for a in (advantages, advantages.expand(3, 5)))
    assert one.item() == pytest.approx(all_.item())


def test_missing_loss_argument_error_names_argument():
    x = torch.zeros(2)
    with pytest.raises(ValueError, match="beta > 0 needs ref_logprobs"):
        GRPOLoss(beta=0.1)(x, x, x, x)
    with pytest.raises(ValueError, match="entropy_coef > 0 needs the argument entropy"):
        GRPOLoss(entropy_coef=0.1)(x, x, x, x)


@pytest.mark.parametrize("clips", [(-0.1, 0.2), (1.0, 0.2), (0.2, -0.1)])
def test_invalid_loss_clip_settings_raise(clips: tuple[float, float]):
    with pytest.raises(ValueError, match="clip_low must be in"):
        GRPOLoss(*clips)
    with pytest.raises(ValueError, match="clip_ratio must be None or at least 0"):
        ReinforceLoss(-0.1)
