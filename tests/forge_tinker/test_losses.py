"""Losses, gradients and steps beside plain torch on transformers' model with the same adapter."""

import urllib.request

import numpy as np
import pytest
import tinker
import torch
from safetensors.torch import load
from transformers import AutoModelForCausalLM

from .conftest import make_datum

pytestmark = pytest.mark.processes

TEXTS = ["abc>cba", "fghij>jih", "xy>yx"]
CLIP = (0.8, 1.2)


class PlainModel:
    """Transformers' model with the factors of an adapter added to its weights, in float32."""

    def __init__(self, base_model, factors, rank):
        self.model = AutoModelForCausalLM.from_pretrained(base_model, attn_implementation="eager")
        self.model.requires_grad_(False)
        self.factors = {name: value.clone().requires_grad_() for name, value in factors.items()}
        self.scale = 32 / rank

    def score(self, datum):
        weights = {name: value for name, value in self.model.named_parameters()}
        weights["lm_head.weight"] = self.model.lm_head.weight
        for name, a in self.factors.items():
            if ".lora_A." in name:
                b = self.factors[name.replace("lora_A", "lora_B")]
                path = name.removeprefix("base_model.model.").replace("lora_A.", "")
                weights[path] = weights[path] + self.scale * b @ a
        head = weights.pop("lm_head.weight")
        tokens = torch.tensor([datum.model_input.to_ints()])
        backbone = {name.removeprefix("model."): value for name, value in weights.items()}
        states = torch.func.functional_call(self.model.model, backbone, (tokens,)).last_hidden_state[0]
        logprobs = (states @ head.T).log_softmax(-1)
        targets = datum.loss_fn_inputs["target_tokens"].to_torch()
        if targets.is_sparse or targets.is_sparse_csr:
            targets = targets.to_dense()
        return logprobs.gather(1, targets.view(len(logprobs), -1)).view(targets.shape)


def objective(name, p, inputs):
    """The published formulas, written out; the sum over a datum's tokens."""
    if name == "cross_entropy":
        return -(p * inputs["weights"]).sum()
    q, advantages = inputs["logprobs"], inputs["advantages"]
    ratio = (p - q).exp()
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    if name == "ppo":
        return -torch.minimum(ratio * advantages, ratio.clamp(*CLIP) * advantages).sum()
    if name == "cispo":
        return -(ratio.clamp(*CLIP).detach() * p * advantages).sum()
    if name == "dro":
        return -(p * advantages - 0.5 * 0.05 * (p - q) ** 2).sum()
    mask = inputs["sequence_ratio_mask"]
    mean = ((p - q).detach() * mask).sum() / mask.sum()
    ratio = (mean + p - p.detach()).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantages).sum()


def make_data(name, seed):
    generator = torch.Generator().manual_seed(seed)
    data = []
    for text in TEXTS:
        length = len(text) - 1
        inputs = {"weights": torch.rand(length, generator=generator).tolist()}
        if name != "cross_entropy":
            inputs = {
                "logprobs": (-3 - torch.rand(length, generator=generator)).tolist(),
                "advantages": torch.randn(length, generator=generator).tolist(),
            }
        if name == "gspo":
            inputs["sequence_ratio_mask"] = [float(i % 3 > 0) for i in range(length)]
        data.append(make_datum(text, 2, **inputs))
    return data


@pytest.fixture(scope="module")
def shared_client(server):
    with tinker.ServiceClient(base_url=server.url, api_key="tml-losses") as service:
        client = service.create_lora_training_client(server.model, rank=4, seed=3).result()
        yield client


def read_factors(client, name):
    """The factors of a client's adapter, from the files that it downloads."""
    path = client.save_weights_external(name).result().path
    rest = tinker.RestClient(base_url=client.holder._base_url, api_key=client.holder._api_key)
    urls = rest.get_external_weights_urls(path).result().urls
    with urllib.request.urlopen(urls["adapter_model.safetensors"]) as answer:
        return load(answer.read())


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_losses_and_steps_equal_plain_torch(service, server, name):
    client = service.create_lora_training_client(server.model, rank=4, seed=3).result()
    plain = PlainModel(server.model, read_factors(client, "start"), rank=4)
    optimizer = torch.optim.AdamW(plain.factors.values(), 1e-2, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.1)
    settings = {"learning_rate": 1e-2, "beta1": 0.8, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1}

    # B is 0 before the first step, which makes every later gradient one of all factors.
    for number, loss in enumerate(("cross_entropy", name)):
        data = make_data(loss, number)
        passes = [client.forward_backward(part, loss) for part in (data[:1], data[1:])]  # the gradient accumulates
        step = client.optim_step(tinker.AdamParams(**settings, grad_clip_norm=1.0)).result()
        outputs = [output["logprobs"].to_torch() for p in passes for output in p.result().loss_fn_outputs]
        inputs = [{key: value.to_torch() for key, value in datum.loss_fn_inputs.items()} for datum in data]
        scored = [plain.score(datum) for datum in data]
        for returned, expected in zip(outputs, scored, strict=True):
            torch.testing.assert_close(returned, expected.detach(), atol=2e-5, rtol=0)
        formula = sum(float(objective(loss, *pair)) for pair in zip(outputs, inputs, strict=True))
        assert sum(p.result().metrics["loss:sum"] for p in passes) == pytest.approx(formula, rel=1e-6, abs=1e-5)

        optimizer.zero_grad()
        sum(objective(loss, *pair) for pair in zip(scored, inputs, strict=True)).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.factors.values(), 1.0)
        assert step.metrics["grad_norm:mean"] == pytest.approx(float(norm), rel=1e-4)
        optimizer.step()
        for key, trained in read_factors(client, f"step-{number}").items():
            # Where a gradient is 0 but for rounding, Adam's step is of either sign.
            equal = (trained - plain.factors[key].detach()).abs() < 1e-4
            assert equal.float().mean() > 0.99, key
            plain.factors[key].data.copy_(trained)


def test_several_targets_of_a_position(shared_client, server):
    plain = PlainModel(server.model, read_factors(shared_client, "several"), rank=4)
    tokens = [3, 4, 5, 6]
    generator = torch.Generator().manual_seed(0)
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            "target_tokens": torch.randint(3, 20, (4, 3), generator=generator),
            "weights": torch.rand(4, 3, generator=generator),
        },
    )
    result = shared_client.forward([datum], "cross_entropy").result()
    expected = plain.score(datum).detach()
    np.testing.assert_allclose(result.loss_fn_outputs[0]["logprobs"].to_numpy(), expected, atol=2e-5)
    weights = datum.loss_fn_inputs["weights"].to_torch().to_dense()
    assert result.metrics["loss:sum"] == pytest.approx(float(-(expected * weights).sum()), rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "config", "inputs", "message"),
    [
        ("ppo", {"epsilon": 0.2}, {"logprobs": [0.0], "advantages": [1.0]}, "has no 'epsilon'"),
        ("ppo", {}, {"advantages": [1.0]}, r"needs loss_fn_inputs\['logprobs'\]"),
        ("ppo", {"clip_low_threshold": 2.0}, {"logprobs": [0.0], "advantages": [1.0]}, "at most clip_high"),
        ("cross_entropy", {}, {"weights": [1.0, 1.0]}, "has 2 rows, model_input 1"),
        ("stable_reinforce", {}, {"advantages": [1.0]}, "with_provenance"),
        ("custom", {}, {"weights": [1.0]}, "loss_fn must be one of"),
    ],
)
def test_invalid_data_raise_and_leave_the_client_usable(shared_client, loss, config, inputs, message):
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([3]), loss_fn_inputs={"target_tokens": [4], **inputs})
    with pytest.raises(tinker.RequestFailedError, match=message):
        shared_client.forward_backward([datum], loss, config).result()
    shared_client.forward(make_data("cross_entropy", 0), "cross_entropy").result()
