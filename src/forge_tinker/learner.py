"""One frozen model, and the adapters that are trained on it: one request at a time, each a function of its inputs."""

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from forge.system.devices import find_accelerator
from forge.training.attention import NAME
from forge.training.linear import FastLinear, at_least_float32, token_logprobs
from forge.training.lora import LoraLinear
from forge.training.policy import Policy, rank_tokens
from forge.types import Batch

from .adapters import ALPHA, Adapter, read_factors
from .losses import LOSSES, Tokens, check_loss
from .wire import NO_LOGPROB, Datum, Scores, write_pass_result

MICRO_TOKENS = 8192  # most tokens of a forward pass, unless one datum has more
ROWS = 256  # of logits at a time
OPENED = 4  # adapters of samplers whose prompts are scored
HEAD = "lm_head"


class AdaptedHead(FastLinear):
    """An output head whose `weight`, which losses read, includes the adapter of its input."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    scaling: float

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Return W + scaling * B A."""
        base: Any = self._parameters["weight"]
        return torch.addmm(base, self.lora_B.weight, self.lora_A.weight, alpha=self.scaling)


class Learner:
    """The frozen model. All methods must be called from one thread."""

    def __init__(self, folder: Path) -> None:
        self.policy = Policy.from_pretrained(folder).to(torch.device(find_accelerator() or "cpu"))
        self.policy.requires_grad_(False)
        self.policy.train()
        self.layers: dict[str, Any] = {
            path: module for path, module in self.policy.model.named_modules() if type(module) is FastLinear
        }
        self._vocabulary = self.policy.model.config.get_text_config().vocab_size
        self.open = lru_cache(OPENED)(open_adapter)

    def create(self, config: Mapping[str, Any]) -> Adapter:
        """Return a new adapter, whose outputs are the base model's at first.

        Args:
            config: fields of the protocol's `LoraConfig`; equal seeds draw equal factors.

        Raises:
            ValueError: the rank is out of range, or no layer is chosen.
        """
        rank, factors = config["rank"], {}
        if not 1 <= rank <= 4096:
            raise ValueError(f"lora_config.rank must be 1 to 4096, got {rank}")
        for path, module in self.layers.items():
            if not config[f"train_{kind_of(path)}"]:
                continue
            generator = torch.Generator().manual_seed(zlib.crc32(f"{config['seed']} {path}".encode()))
            a = torch.empty(rank, module.in_features)
            nn.init.kaiming_uniform_(a, 5**0.5, generator=generator)
            device = module._parameters["weight"].device
            factors[path] = a.to(device), torch.zeros(module.out_features, rank, device=device)
        if not factors:
            raise ValueError("lora_config chooses no layer of this model: set train_mlp, train_attn or train_unembed")
        return Adapter(factors, rank)

    def install(self, adapter: Adapter | None) -> None:
        """Compute with an adapter from now on; None: with the base model."""
        for path, module in self.layers.items():
            pair = adapter.factors.get(path) if adapter else None
            if adapter is None or pair is None:
                module.__class__ = FastLinear
                continue
            if not hasattr(module, "lora_A"):
                module.lora_A, module.lora_B = (nn.utils.skip_init(FastLinear, 1, 1, bias=False) for _ in pair)
            module.lora_A.weight, module.lora_B.weight = pair
            module.__class__ = AdaptedHead if path == HEAD else LoraLinear
            module.scaling = ALPHA / adapter.rank

    def run_pass(
        self, adapter: Adapter, loss: str, data: Sequence[Datum], config: Mapping[str, Any], *, forward_only: bool
    ) -> bytes:
        """Compute a loss and, unless `forward_only`, add its gradient to the adapter's; return the result's bytes.

        Raises:
            ValueError: an invalid loss, setting or tensor.
        """
        settings = check_loss(loss, config)
        for number, datum in enumerate(data):
            self.check_tokens(datum.tokens, f"data[{number}].model_input")
            self.check_tokens(datum.inputs["target_tokens"].ravel(), f"data[{number}]: target_tokens")
        names = set.intersection(*(set(datum.inputs) for datum in data)) - {"target_tokens"}

        self.install(adapter)
        # A request that fails leaves the gradient as it was.
        gradients = [None if parameter.grad is None else parameter.grad.clone() for parameter in adapter.parameters]
        try:
            with torch.set_grad_enabled(not forward_only):
                return self._add_gradients(loss, data, names, settings)
        except BaseException:
            for parameter, gradient in zip(adapter.parameters, gradients, strict=True):
                parameter.grad = gradient
            raise

    def _add_gradients(
        self, loss_name: str, data: Sequence[Datum], names: set[str], settings: Mapping[str, float]
    ) -> bytes:
        outputs, total = [], 0.0
        for rows in split_data(data):
            logprobs = self._score_targets(rows)
            inputs = {
                name: torch.from_numpy(np.concatenate([row.inputs[name] for row in rows]).astype(np.float32)).to(
                    logprobs.device
                )
                for name in names
            }
            lengths = torch.tensor([len(row.tokens) for row in rows])
            sequences = torch.arange(len(rows)).repeat_interleave(lengths).to(logprobs.device)
            losses = LOSSES[loss_name](Tokens(logprobs, inputs, settings, sequences))
            loss = losses.sum()
            if torch.is_grad_enabled():
                loss.backward()
            total += loss.item()
            columns = (values.detach().cpu().split(lengths.tolist()) for values in (logprobs, losses))
            outputs += [
                {"logprobs": of_tokens.numpy(), "elementwise_loss": of_losses.numpy()}
                for of_tokens, of_losses in zip(*columns, strict=True)
            ]
        return write_pass_result(outputs, {"loss:sum": total})

    def _score_targets(self, rows: Sequence[Datum]) -> Tensor:
        """Return the targets' log-probabilities, of the shape of all targets in a row."""
        targets = np.concatenate([row.inputs["target_tokens"] for row in rows])
        columns = targets.reshape(len(targets), -1).T
        batches = [make_batch([row.tokens for row in rows], column) for column in columns]
        if len(batches) == 1 or type(self.policy) is not Policy:
            scored = [self.policy(batch).logprobs for batch in batches]
        else:
            # The states do not depend on the targets: they are computed once.
            states, _, ranks = self.policy.states(batches[0], lag=1)
            weight: Any = self.policy.model.get_output_embeddings().weight
            packs = [rank_tokens(batch, 1, ranks) for batch in batches]
            scored = [token_logprobs(states, weight, pack.labels)[0][pack.order] for pack in packs]
        return torch.stack(scored, -1).view(targets.shape)

    @torch.no_grad()
    def score_prompt(
        self,
        folder: Path | None,
        tokens: Sequence[int],
        *,
        logprobs: bool = False,
        last: int | None = None,
        top_k: int = 0,
        targets: np.ndarray | None = None,
        draws: int = 0,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> Scores:
        """Return scores of a prompt's tokens.

        Args:
            folder: of an adapter; None for the base model's scores.
            last: score only this many tokens; None: all but the first.
            top_k: most probable tokens of each position.
            targets: [length - 1, k], tokens to score at each position but the first; -1 for none.
            draws: tokens to draw at each position but the first, at `temperature`, by `seed`.
        """
        if len(tokens) < 2:
            return Scores(np.full(1, np.nan) if logprobs else None)
        self.install(None if folder is None else self.open(folder))
        scores = Scores()
        if logprobs:
            scored = self.policy(make_batch([tokens[:-1]], np.asarray(tokens[1:]))).logprobs.cpu().numpy()
            scores.logprobs = np.concatenate([[np.nan], scored])
            scores.logprobs[: len(tokens) - (last or len(tokens))] = np.nan
        if not (top_k or targets is not None or draws):
            return scores

        generator = torch.Generator().manual_seed(seed)
        pieces: list[dict[str, Tensor]] = []
        for start, rows in self._iterate_logprobs(tokens):
            piece = dict(zip(("top", "top_ids"), rows.topk(top_k), strict=True))
            if targets is not None:
                wanted = torch.from_numpy(targets[start : start + len(rows)].copy())
                piece["targets"] = rows.gather(1, wanted.clamp(min=0)).masked_fill(wanted < 0, torch.nan)
            if draws:
                weights = (rows / max(temperature, 1e-6)).softmax(-1)
                piece["drawn_ids"] = torch.multinomial(weights, draws, replacement=True, generator=generator)
                piece["drawn"] = rows.gather(1, piece["drawn_ids"])
            pieces.append(piece)

        joined = {name: torch.cat([piece[name] for piece in pieces]).numpy() for name in pieces[0]}
        if top_k:
            # The first token has no score, nor have those before the last `last`.
            top_ids, top = (np.concatenate([joined[name][:1], joined[name]]) for name in ("top_ids", "top"))
            unscored = max(1, len(tokens) - (last or len(tokens)))
            top_ids[:unscored], top[:unscored] = 0, NO_LOGPROB
            scores.top = top_ids, top
        scores.targets = joined.get("targets")
        if draws:
            scores.drawn = joined["drawn_ids"], joined["drawn"]
        return scores

    def _iterate_logprobs(self, tokens: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield (start, log-probabilities [rows, vocabulary]) of the tokens after each but the last, in pieces."""
        model: Any = self.policy.model
        traits = getattr(self.policy, "traits", None)
        if traits is not None and (traits.attention != NAME or traits.scale is None):
            logits = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0, :-1]
            yield 0, at_least_float32(logits).log_softmax(-1).cpu()
            return
        states, local, _ = self.policy.states(make_batch([tokens[:-1]], np.asarray(tokens[1:])), lag=1)
        weight = model.get_output_embeddings().weight * (1.0 if traits is None else traits.scale)
        for number, piece in enumerate(states[local.order].split(ROWS)):
            yield number * ROWS, at_least_float32(piece @ weight.T).log_softmax(-1).cpu()

    def check_tokens(self, tokens: Any, name: str) -> None:
        """Raise a ValueError if there is no token, or one outside the vocabulary."""
        if not len(tokens):
            raise ValueError(f"{name} is empty")
        lowest, highest = min(tokens), max(tokens)
        if lowest < 0 or highest >= self._vocabulary:
            raise ValueError(f"{name}: token ids must be 0 to {self._vocabulary - 1}, got {lowest} to {highest}")


def open_adapter(folder: Path) -> Adapter:
    """Return the adapter of a folder."""
    factors = read_factors(folder)
    return Adapter(factors, len(next(iter(factors.values()))[0]))


def open_base(model: str, folder: Path) -> Path:
    """Return the folder of the base model; of one whose head and embedding share weights, a copy in which they do not.

    Args:
        model: folder of the model.
        folder: where the copy is kept.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if not AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config().tie_word_embeddings:
        return Path(model)
    untied = folder / "base"
    if untied.exists():
        return untied
    loaded = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False, use_safetensors=True)
    head = loaded.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    loaded.config.get_text_config().tie_word_embeddings = False
    loaded.config.tie_word_embeddings = False
    unfinished = folder / "base.unfinished"
    loaded.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(model, trust_remote_code=False).save_pretrained(unfinished)
    unfinished.rename(untied)
    return untied


def kind_of(path: str) -> str:
    """Return to which part of a model a layer belongs: attn, mlp or unembed.

    >>> kind_of("model.layers.0.mlp.up_proj"), kind_of("model.layers.0.self_attn.q_proj"), kind_of("lm_head")
    ('mlp', 'attn', 'unembed')
    """
    if path == HEAD:
        return "unembed"
    return "mlp" if re.search(r"mlp|feed|ffn|expert", path) else "attn"


def split_data(data: Sequence[Datum]) -> Iterator[list[Datum]]:
    """Yield the data in groups of at most MICRO_TOKENS tokens, in order; a longer datum is a group of one."""
    group: list[Datum] = []
    tokens = 0
    for datum in data:
        if group and tokens + len(datum.tokens) > MICRO_TOKENS:
            yield group
            group, tokens = [], 0
        group.append(datum)
        tokens += len(datum.tokens)
    yield group


def make_batch(inputs: Sequence[Sequence[int]], targets: np.ndarray) -> Batch:
    """Return a batch that scores a target after each input token.

    Args:
        inputs: tokens of each sequence.
        targets: of all sequences in a row, [tokens].
    """
    lengths = np.array([len(tokens) + 1 for tokens in inputs])
    count = int(lengths.sum())
    mask = np.ones(count, bool)
    mask[np.cumsum(lengths) - lengths] = False
    # The token after each sequence's last one is not read by any state that is scored.
    tokens = np.concatenate([np.append(tokens, tokens[-1]) for tokens in inputs]).astype(np.int64)
    scored = np.zeros(count, np.int64)
    scored[mask] = targets
    zeros = np.zeros(count, np.float32)
    return Batch(tokens, lengths, mask, zeros, np.zeros(count, np.int64), zeros, zeros, targets=scored)
