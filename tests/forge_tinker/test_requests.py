"""Cases that other servers of the protocol got wrong, and hostile requests."""

import json

import httpx
import pytest
import tinker

from .conftest import encode, make_datum

pytestmark = pytest.mark.processes


def test_samplers_keep_their_weights_during_training(service, server):
    client = service.create_lora_training_client(server.model, rank=4, seed=2).result()
    tokens = tinker.ModelInput.from_ints(encode("abc>cba"))
    first = client.save_weights_and_get_sampling_client().result()
    reference = first.compute_logprobs(tokens).result()

    # These futures are not awaited; a save after them includes all of them.
    for _ in range(40):
        client.forward_backward([make_datum("abc>cba", 4)], "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=1e-2))
    second = client.save_weights_and_get_sampling_client().result()
    state = client.save_state("trained").result().path
    trained = second.compute_logprobs(tokens).result()
    assert trained[-1] > reference[-1] + 1
    assert first.compute_logprobs(tokens).result() == reference

    # A checkpoint of training samples as one for sampling does.
    assert service.create_sampling_client(state).result().compute_logprobs(tokens).result() == trained


def test_sampled_provenance_trains_what_was_recorded(service, server):
    client = service.create_lora_training_client(server.model, rank=4, seed=2).result()
    sampler = client.save_weights_and_get_sampling_client(record_stability_info=True).result()
    prompt = encode("abc>")
    settings = tinker.SamplingParams(max_tokens=3, seed=1)
    (sequence,) = sampler.sample(tinker.ModelInput.from_ints(prompt), 1, settings).result().sequences
    count = len(sequence.tokens)
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(prompt + sequence.tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": (prompt + sequence.tokens)[1:],
            "advantages": [0.0] * (len(prompt) - 1) + [1.5] * count,
        },
    ).with_provenance(
        model_input=[
            tinker.PromptProvenanceSpan(sequence_id=sequence.sequence_id, length=len(prompt)),
            tinker.SampledProvenanceSpan(sequence_id=sequence.sequence_id, length=count - 1),
        ],
        loss_fn_inputs=[
            tinker.PromptProvenanceSpan(sequence_id=sequence.sequence_id, offset=1, length=len(prompt) - 1),
            tinker.SampledProvenanceSpan(sequence_id=sequence.sequence_id, length=count),
        ],
    )
    result = client.forward_backward([datum], "stable_reinforce").result()
    # On policy the weight is 1, so the loss is -A * log p of the sampled tokens.
    assert result.metrics["loss:sum"] == pytest.approx(-1.5 * sum(sequence.logprobs), rel=1e-4)


HEADERS = {"X-API-Key": "tml-hostile", "Content-Type": "application/json"}
PASS = {**HEADERS, "Content-Type": "application/x-protobuf"}
MODEL = "0" * 32 + ":train:0"
SAMPLE = {"sampling_session_id": "x", "seq_id": 0, "prompt": {"chunks": []}, "sampling_params": {}}


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("create_session", b"{", HEADERS, 422),
        ("create_session", b"[" * 100_000, HEADERS, 422),
        ("create_session", {"tags": 7, "user_metadata": None, "sdk_version": "1"}, HEADERS, 422),
        ("create_session", b"tags=a", {**HEADERS, "Content-Type": "application/x-www-form-urlencoded"}, 415),
        ("create_session", {}, {**HEADERS, "Host": "rebound.example"}, 403),
        ("create_session", {}, {**HEADERS, "Origin": "https://page.example"}, 403),
        ("session_heartbeat", {"session_id": "x"}, HEADERS, 404),
        ("sessions/x/finish", {"reason": {"type": "success"}}, HEADERS, 404),
        (
            "create_model",
            {"session_id": "x", "model_seq_id": 0, "base_model": "m", "lora_config": {"rank": 8}},
            HEADERS,
            422,
        ),
        ("get_info", {"model_id": MODEL}, HEADERS, 404),
        ("forward_backward", b"\xff" * 64, PASS, 422),
        ("forward_backward", b"\n\x01x", PASS, 404),
        ("forward_backward", b"\x28\xb5\x2f\xfd" + b"\xff" * 16, {**PASS, "Content-Encoding": "zstd"}, 415),
        ("optim_step", {"model_id": MODEL, "seq_id": 1, "adam_params": {}}, HEADERS, 404),
        ("optim_step", [1], HEADERS, 422),
        ("save_weights", {"model_id": ["x"], "seq_id": 1}, HEADERS, 422),
        ("load_weights", {"path": "tinker://../weights/x", "optimizer": True, "model_id": MODEL}, HEADERS, 422),
        ("asample", SAMPLE, HEADERS, 404),
        ("asample", {**SAMPLE, "sampling_params": {"max_tokens": "many"}}, HEADERS, 422),
        ("asample", {**SAMPLE, "num_samples": 10**9}, HEADERS, 422),
        ("retrieve_future", {"request_id": "x"}, HEADERS, 410),
        ("weights_info", {"tinker_path": "tinker://x/weights/../../journal.sqlite"}, HEADERS, 422),
        ("copy_weights", {"source_path": "/etc/passwd"}, HEADERS, 422),
    ],
)
def test_hostile_request_has_one_line_of_error(server, path, body, headers, status):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx.post(f"{server.url}/api/v1/{path}", content=content, headers=headers, timeout=60)
    assert answer.status_code == status, answer.text
    assert "\n" not in answer.json()["detail"]


def test_links_to_files_are_signed(service, server):
    client = service.create_lora_training_client(server.model, rank=4).result()
    path = client.save_weights_external("a").result().path
    rest = tinker.RestClient(base_url=server.url, api_key="tml-tests")
    link = rest.get_external_weights_urls(path).result().urls["adapter_config.json"]
    assert httpx.get(link).status_code == 200
    for changed in (link.replace("adapter_config.json", "optimizer.safetensors"), link.replace("/files/", "/files/0")):
        assert httpx.get(changed).status_code == 403
    with pytest.raises(tinker.RequestFailedError, match="letters, digits"):
        client.save_state("../../escape").result()
