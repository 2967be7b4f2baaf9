"""The interface of algorithms: the loss of every token, its advantages, and how its batch is made."""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .advantages import group_relative
from .correction import Correction
from .terms import Estimator, importance_ratio, kl, weighted_sum, where_trained

Aggregation = Literal["token_mean", "sequence_mean", "fixed_horizon"]

# The tensors that a loss may take by name, see `forge.algorithms`.
TENSORS = (
    *("logprobs", "entropy", "behaviour_logprobs", "proximal_logprobs", "ref_logprobs", "advantages", "values"),
    *("old_values", "returns", "weights", "padding_mask", "sequences", "branch_shares"),
    *("tokens", "positions", "groups"),
)


@dataclass(eq=False)
class Algorithm:
    """A policy-gradient algorithm. Subclasses are dataclasses: their fields are the settings of the YAML's `grpo`.

        loss = sum over tokens of weights * (correction * token_loss + beta * KL(pi || ref) - entropy_coef * H(pi))

    A subclass writes `token_loss` and `advantages` as in its paper, and overrides `ratio` if the paper's ratio is not
    of single tokens. `ratio` is `pi / old`. The old policy is the one that sampled. With a `correction` it is the
    proximal policy, which the step starts from, and the correction is the importance weight of that policy against the
    one that sampled (Hilton et al. 2022).

    Args:
        beta: weight of the KL to a frozen reference model.
        kl: estimator of that KL, see `forge.algorithms.terms.kl`.
        kl_in: "loss" adds the KL to the loss; "reward" subtracts it from each token's reward, see
            `forge.training.credit.assign_credit`.
        entropy_coef: weight of the entropy bonus.
        correction: importance weights for tokens that another policy sampled; None: no weights.

    Class attributes:
        aggregation: how tokens share the loss, see `forge.data.packing.pack`.
        fixed_aggregation: the loss is only defined under that aggregation.
        uses_rewards: the advantages depend on rewards.
        advantages_alone: a token whose advantage is 0 has no gradient if beta and entropy_coef are 0.
        within_group: samples of a prompt are compared with one another, so that equal rewards carry no signal.
        whiten: token advantages are normalised to mean 0 and deviation 1 over the batch.
        needs_critic: advantages are GAE over a critic's values, with `discount` and `trace`.
        needs_teacher: the reference model must be another model than the one that training starts from.
        on_policy: every sample is treated as the current policy's own.
        dynamic_sampling: maximum number of prompts without signal that are replaced for each prompt of a batch.

    Raises:
        ValueError: a setting out of its range.
    """

    _: KW_ONLY
    beta: float = 0.0
    kl: Estimator = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    entropy_coef: float = 0.0
    correction: Correction | None = None

    aggregation: ClassVar[Aggregation] = "token_mean"
    fixed_aggregation: ClassVar[bool] = False
    uses_rewards: ClassVar[bool] = True
    advantages_alone: ClassVar[bool] = True
    needs_critic: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = False
    whiten: ClassVar[bool] = False
    # Some algorithms have these as settings.
    within_group = True
    on_policy = False
    discount = 1.0
    trace = 1.0
    dynamic_sampling = 0

    def __post_init__(self) -> None:
        if not (0 <= self.beta < math.inf and 0 <= self.entropy_coef < math.inf):
            raise ValueError(
                f"beta and entropy_coef must be at least 0 and finite, got {self.beta} and {self.entropy_coef}"
            )
        if not isinstance(self.correction, Correction | None):
            raise ValueError(f"correction must be a Correction (grpo.correction in the YAML), got {self.correction!r}")
        if self.kl not in ("k1", "k2", "k3"):
            raise ValueError(f"kl must be k1, k2 or k3, got {self.kl!r}")
        if self.kl_in not in ("loss", "reward"):
            raise ValueError(f"kl_in must be loss or reward, got {self.kl_in!r}")

    @property
    def needs_reference(self) -> bool:
        """Return whether the loss reads `ref_logprobs`."""
        return self.needs_teacher or self.beta > 0

    def advantages(self, rewards: Sequence[Sequence[float]]) -> Any:
        """Return the advantage of each episode of a batch, [groups][samples]; the default is GRPO's.

        An advantage is one number, or a list with a number for each trained token of the episode. An override may have
        a second parameter `episodes`: it then also gets the `forge.types.Episode` of each reward, [groups][samples].

        Args:
            rewards: [groups][samples].
        """
        return [group_relative(group) for group in rewards]

    def ratio(self, logprobs: Tensor, old_logprobs: Tensor, weights: Tensor, sequences: Tensor | None) -> Tensor:
        """Return each token's ratio of probabilities, policy in training to old policy; all tensors have one shape."""
        return importance_ratio(logprobs, old_logprobs)

    def token_loss(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """Return the loss of every token, to be minimised; all tensors have one shape.

        An override gets the tensors that its parameters name: these three, or others listed in `forge.algorithms`, such
        as `behaviour_logprobs`, `tokens` and `positions`.
        """
        return -ratio * advantages

    @property
    def further(self) -> tuple[str, ...]:
        """Return the names of the additional tensors that `token_loss` takes."""
        return tuple(name for name in self._parameter_names if name not in ("ratio", "logprobs", "advantages"))

    @property
    def _parameter_names(self) -> tuple[str, ...]:
        """Return the names of the parameters of `token_loss`, in any order."""
        parameters = inspect.signature(self.token_loss).parameters.values()
        return tuple(p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))

    def clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor | None:
        """Return a bool mask of the tokens whose gradient was removed or reduced by a bound of the loss, in the
        arguments' shape. None: the loss has no bounds."""
        return None

    def __call__(
        self,
        logprobs: Tensor,
        behaviour_logprobs: Tensor,
        advantages: Tensor,
        weights: Tensor,
        ref_logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
        proximal_logprobs: Tensor | None = None,
        sequences: Tensor | None = None,
        **further: Tensor,
    ) -> Tensor:
        """Return the loss, a scalar. All tensors have one shape, [batch, seq] or packed [tokens].

        Args:
            proximal_logprobs: None: the current policy's.
            sequences: [tokens], required if tokens are packed and a term is taken over sequences.
            further: the other tensors that `token_loss` names.

        Raises:
            ValueError: `beta` without `ref_logprobs`, or `entropy_coef` without `entropy`.
        """
        # Values at tokens that are not trained, NaN included, must not reach the gradient.
        logprobs = where_trained(logprobs, weights)
        advantages = where_trained(advantages, weights)
        behaviour = where_trained(behaviour_logprobs, weights)
        old = self._old_logprobs(logprobs, behaviour, proximal_logprobs, weights)

        # By name, as a parameter in another position would silently get another tensor.
        tensors: dict[str, Any] = {
            "ratio": self.ratio(logprobs, old, weights, sequences),
            "logprobs": logprobs,
            "advantages": advantages,
            "behaviour_logprobs": behaviour,
            "weights": weights,
            "entropy": entropy,
            "sequences": sequences,
            "ref_logprobs": ref_logprobs,
            **further,
        }

        per_token = self.token_loss(**{name: tensors[name] for name in self._parameter_names})
        if self.correction is not None:
            per_token = per_token * self.correction.bounded(self.correction.ratio(old, behaviour, weights, sequences))

        # Two additional terms, each with its weight.
        if self.beta and self.kl_in == "loss":
            if ref_logprobs is None:
                raise ValueError("beta > 0 needs ref_logprobs: start a reference model, or set grpo.beta to 0")
            per_token = per_token + self.beta * kl(logprobs, where_trained(ref_logprobs, weights), self.kl)

        if self.entropy_coef:
            if entropy is None:
                raise ValueError(
                    "entropy_coef > 0 needs the argument entropy: pass the policy's entropy of each token, or set "
                    "entropy_coef to 0"
                )
            per_token = per_token - self.entropy_coef * where_trained(entropy, weights)

        return weighted_sum(per_token, weights)

    @torch.no_grad()
    def metrics(
        self,
        logprobs: Tensor,
        behaviour_logprobs: Tensor,
        advantages: Tensor,
        weights: Tensor,
        proximal_logprobs: Tensor | None = None,
        sequences: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return metrics by name, each 1 or 0 per token.

        `clip_fraction` (if the loss has bounds): a bound removed or reduced the token's gradient. `correction_fraction`
        (with a correction): a bound of the correction changed the token's importance weight.
        """
        old = self._old_logprobs(logprobs, behaviour_logprobs, proximal_logprobs, weights)
        is_clipped = self.clipped(self.ratio(logprobs, old, weights, sequences), advantages)
        metrics = {} if is_clipped is None else {"clip_fraction": is_clipped.float()}

        if self.correction is not None:
            importance = self.correction.ratio(old, behaviour_logprobs, weights, sequences)
            metrics["correction_fraction"] = (self.correction.bounded(importance) != importance).float()

        return metrics

    def _old_logprobs(self, logprobs: Tensor, behaviour: Tensor, proximal: Tensor | None, weights: Tensor) -> Tensor:
        if self.correction is None:
            return behaviour
        return logprobs.detach() if proximal is None else where_trained(proximal, weights)


@dataclass(eq=False)
class OwnLoss(Algorithm):
    """A function or `nn.Module` over named tensors as the loss, with GRPO's advantages.

    Args:
        function: gets a reference model's `ref_logprobs` if its `beta` (a parameter or an attribute) is above 0, or if
            it requires `ref_logprobs` and has no `beta`.
        settings: the arguments of a function that are not tensors.
    """

    function: Callable[..., Tensor]
    settings: dict[str, Any] = field(default_factory=dict)

    advantages_alone: ClassVar[bool] = False  # unknown for user-defined losses

    def __post_init__(self) -> None:
        call = getattr(self.function, "forward", self.function)

        # `beta` is a setting, an attribute of a module, or the default of a parameter.
        parameters = inspect.signature(call).parameters
        default = getattr(self.function, "beta", parameters["beta"].default if "beta" in parameters else None)
        beta = self.settings.get("beta", default)
        self.beta = float(beta) if isinstance(beta, int | float) else 0.0
        ref = parameters.get("ref_logprobs")
        self._requires_reference = ref is not None and ref.default is ref.empty and beta is None
        # As `forward`, by which the trainer finds the tensors that the function itself names.
        self.forward = partial(call, **self.settings) if self.settings else call

    @property
    def aggregation(self) -> Aggregation:  # type: ignore[override]
        """Return the function's attribute `aggregation`, or else the default."""
        return getattr(self.function, "aggregation", Algorithm.aggregation)

    @property
    def needs_reference(self) -> bool:
        """Return whether the function requires `ref_logprobs`, or has a `beta` above 0."""
        return self._requires_reference or self.beta > 0

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.forward(*args, **kwargs)

    @property
    def metrics(self) -> Any:  # type: ignore[override]
        """Return the function's attribute `metrics`.

        Raises:
            AttributeError: it has none; `hasattr` is then False for this object, too.
        """
        return self.function.metrics  # type: ignore[attr-defined]
