"""Losses, gradients and steps beside plain torch on transformers' model with the same adapter."""

import numpy as np
import pytest
import torch
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
    import tinker

    with tinker.ServiceClient(base_url=server.url, api_key="tml-losses") as service:
        client = service.create_lora_training_client(server.model, rank=4, seed=3).result()
        yield client


def read_factors(client, name):
    """The factors of a client's adapter, from the files that it downloads."""
    import io
    import urllib.request

    from safetensors.torch import load
    from tinker import RestClient

    path = client.save_weights_external(name).result().path
    rest = RestClient(base_url=client.holder._base_url, api_key="tml-losses")
    urls = rest.get_external_weights_urls(path).result().urls
    with urllib.request.urlopen(urls["adapter_model.safetensors"]) as answer:
        return load(io.BytesIO(answer.read()).getvalue())


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_loss_and_step_equal_plain_torch(shared_client, server, name):
    import tinker

    # One step first, so that B is not 0 and every factor has a gradient.
    shared_client.forward_backward(make_data("cross_entropy", 1), "cross_entropy").result()
    shared_client.optim_step(tinker.AdamParams(learning_rate=3e-2)).result()
    before = read_factors(shared_client, f"before-{name}")
    plain = PlainModel(server.model, before, rank=4)
    data = make_data(name, 2)

    # The gradient of two passes accumulates.
    results = [shared_client.forward_backward(part, name) for part in (data[:1], data[1:])]
    settings = {"learning_rate": 1e-2, "beta1": 0.8, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1}
    step = shared_client.optim_step(tinker.AdamParams(**settings, grad_clip_norm=1.0)).result()
    outputs = [output for result in results for output in result.result().loss_fn_outputs]
    total = sum(result.result().metrics["loss:sum"] for result in results)

    tensors = [{key: value.to_torch() for key, value in datum.loss_fn_inputs.items()} for datum in data]
    scored = [plain.score(datum) for datum in data]
    sum(objective(name, p, inputs) for p, inputs in zip(scored, tensors, strict=True)).backward()
    for output, expected in zip(outputs, scored, strict=True):
        np.testing.assert_allclose(output["logprobs"].to_numpy(), expected.detach(), atol=2e-5)
    returned = [output["logprobs"].to_torch() for output in outputs]
    formula = sum(float(objective(name, p, inputs)) for p, inputs in zip(returned, tensors, strict=True))
    assert total == pytest.approx(formula, rel=1e-6, abs=1e-6)
    norm = torch.nn.utils.clip_grad_norm_(plain.factors.values(), 1.0)
    assert norm > 0
    assert step.metrics["grad_norm:mean"] == pytest.approx(float(norm), rel=1e-4)

    after = read_factors(shared_client, f"after-{name}")
    changed = max(float((after[key] - value).abs().max()) for key, value in before.items())
    assert changed > 5e-3  # the factors have moved by about the learning rate
    assert set(after) == set(plain.factors)


def test_first_adam_step_equals_plain_torch(server):
    import tinker

    with tinker.ServiceClient(base_url=server.url, api_key="tml-losses") as service:
        client = service.create_lora_training_client(server.model, rank=4, seed=5).result()
        before = read_factors(client, "before")
        data = make_data("cross_entropy", 4)
        client.forward_backward(data, "cross_entropy").result()
        client.optim_step(tinker.AdamParams(learning_rate=1e-2, weight_decay=0.1)).result()
        after = read_factors(client, "after")

    plain = PlainModel(server.model, before, rank=4)
    optimizer = torch.optim.AdamW(plain.factors.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    loss = [
        objective("cross_entropy", plain.score(d), {"weights": d.loss_fn_inputs["weights"].to_torch()}) for d in data
    ]
    sum(loss).backward()
    optimizer.step()
    # A's gradient is 0, as B is: its first step is weight decay alone. B's first step is lr times a sign.
    for key, value in plain.factors.items():
        near = (after[key] - value.detach()).abs() < 1e-4
        assert near.float().mean() > 0.995, key
    assert any(float((after[key] - value).abs().max()) > 5e-3 for key, value in before.items())


def test_several_targets_of_a_position(shared_client, server):
    import tinker

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
    (output,) = result.loss_fn_outputs
    expected = plain.score(datum).detach()
    np.testing.assert_allclose(output["logprobs"].to_numpy(), expected, atol=2e-5)
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
def test_invalid_data_are_named_and_the_client_goes_on(shared_client, loss, config, inputs, message):
    import tinker

    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([3]), loss_fn_inputs={"target_tokens": [4], **inputs})
    with pytest.raises(tinker.RequestFailedError, match=message):
        shared_client.forward_backward([datum], loss, config).result()
    shared_client.forward(make_data("cross_entropy", 0), "cross_entropy").result()


def test_custom_loss_of_the_client(shared_client, server):
    plain = PlainModel(server.model, read_factors(shared_client, "custom"), rank=4)
    data = make_data("cross_entropy", 6)

    def square(data, logprobs):
        return sum((values**2).sum() for values in logprobs), {"custom:sum": 1.0}

    result = shared_client.forward_backward_custom(data, square).result()
    expected = sum(float((plain.score(datum).detach() ** 2).sum()) for datum in data)
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)
    assert result.metrics["custom:sum"] == 1.0
