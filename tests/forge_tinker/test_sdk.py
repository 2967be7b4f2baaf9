"""Every public method of the SDK's four clients, called through the real client; docs/tinker.md has the table."""

import asyncio
import inspect
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from .conftest import encode, make_datum

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore")]

PAGE = Path(__file__).parents[2] / "docs" / "tinker.md"
CLIENTS = (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient)
# What a server of one's own does not have; each raises an error of the protocol.
UNSUPPORTED = {
    "RestClient": {"export_session_trace", "get_audit_log", "get_billing_usage", "get_current_checkpoint_storage_usage"}
}
UNSUPPORTED["RestClient"] |= {f"{name}_async" for name in UNSUPPORTED["RestClient"]} | {"whoami"}
ADAM = tinker.AdamParams(learning_rate=1e-3)


CALLED = set()  # (client, method)


class Recorder:
    """A client that notes which of its methods were called; coroutines and futures are awaited."""

    def __init__(self, client):
        self.client = client

    def __getattr__(self, name):
        method = getattr(self.client, name)
        if not callable(method):
            return method

        def call(*args, **kwargs):
            CALLED.add((type(self.client).__name__, name))
            result = method(*args, **kwargs)
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
            while hasattr(result, "result"):
                result = result.result()
            return result

        return call


def public_methods():
    return {
        (client.__name__, name)
        for client in CLIENTS
        for name, member in inspect.getmembers(client)
        if not name.startswith("_") and callable(member)
    }


def test_every_method(server):
    CALLED.clear()
    data = [make_datum("abc>cba", 4)]
    key = {"base_url": server.url, "api_key": "tml-sdk"}
    client = tinker.ServiceClient({"run": "7"}, "a project", display_name="every method", **key)
    service = Recorder(client)
    for name in ("get_console_url", "get_telemetry", "get_server_capabilities", "get_server_capabilities_async"):
        getattr(service, name)()
    assert service.get_server_capabilities().supported_models[0].model_name == server.model

    created = {"base_model": server.model, "rank": 4, "seed": 1}
    training = Recorder(service.create_lora_training_client(**created))
    other = service.create_lora_training_client_async(**created)
    assert training.get_info().lora_rank == training.get_info_async().lora_rank == 4
    assert training.get_tokenizer().decode(encode("abc")) == "abc"
    training.get_console_url(), training.get_telemetry()
    for name in ("forward", "forward_async", "forward_backward", "forward_backward_async"):
        getattr(training, name)(data, "cross_entropy")
    training.optim_step(ADAM), training.optim_step_async(ADAM)
    square = client.create_custom_loss(lambda logprobs: ((logprobs**2).sum(), {}), {"logprobs": 1}).result()
    CALLED.add(("ServiceClient", "create_custom_loss"))
    training.forward_backward_custom(data, square)
    training.forward_backward_custom_async(data, lambda data, p: (p[0].sum(), {}))
    training.optim_step(ADAM)

    # Checkpoints, and what starts from them.
    state = training.save_state("a", ttl_seconds=3600, user_metadata={"step": "1"}).path
    training.save_state_async("a", overwrite=True)
    sampled = training.save_weights_for_sampler("a").path
    training.save_weights_for_sampler_async("b")
    external = training.save_weights_external("a").path
    training.save_weights_external_async("b")
    for suffix in ("", "_async"):
        getattr(training, "load_state" + suffix)(state)
        getattr(training, "load_state_with_optimizer" + suffix)(state)
        getattr(service, "create_training_client_from_state" + suffix)(state)
        resumed = getattr(service, "create_training_client_from_state_with_optimizer" + suffix)(state)
    ours, theirs = (c.forward(data, "cross_entropy").result().metrics for c in (training.client, resumed))
    assert ours == theirs
    assert ours != other.forward(data, "cross_entropy").result().metrics

    # Sampling.
    sampler = Recorder(training.save_weights_and_get_sampling_client())
    training.save_weights_and_get_sampling_client_async(kind="inflight")
    for creator in (service, training):
        for suffix in ("", "_async"):
            getattr(creator, "create_sampling_client" + suffix)(model_path=sampled)
    prompt, settings = tinker.ModelInput.from_ints(encode("abc>")), tinker.SamplingParams(max_tokens=3, seed=7)
    first, second = sampler.sample(prompt, 2, settings), sampler.sample_async(prompt, 2, settings)
    assert [s.tokens for s in first.sequences] == [s.tokens for s in second.sequences]
    whole = tinker.ModelInput.from_ints(encode("abc>") + first.sequences[0].tokens)
    scored = sampler.compute_logprobs(whole)
    assert scored == sampler.compute_logprobs_async(whole)
    np.testing.assert_allclose(scored[4:], first.sequences[0].logprobs, atol=2e-5)
    copy = Recorder(sampler.from_sampler_handle(sampler.get_sampler_handle(), api_key="tml-sdk"))
    assert copy.sample(prompt, 2, settings).sequences[1].tokens == first.sequences[1].tokens
    assert sampler.get_base_model() == sampler.get_base_model_async() == server.model
    sampler.get_tokenizer(), sampler.get_telemetry()
    sampler.on_queue_state_change(None, None)
    sampler.create(client.holder, model_path=sampled)

    # What the REST client lists and changes.
    rest = Recorder(service.create_rest_client())
    run, session = training.client.model_id, client.holder.get_session_id()
    handle = sampler.client._sampling_session_id
    calls = {
        "get_training_run": (run,),
        "get_training_run_by_tinker_path": (state,),
        "list_training_runs": (),
        "list_checkpoints": (run,),
        "list_user_checkpoints": (),
        "get_sampler": (handle,),
        "get_session": (session,),
        "list_sessions": (),
        "publish_checkpoint_from_tinker_path": (state,),
        "unpublish_checkpoint_from_tinker_path": (state,),
        "set_checkpoint_ttl_from_tinker_path": (state, 7200),
        "assign_session_project": (session, "moved"),
        "get_external_weights_urls": (external,),
        "copy_weights": (state, "copies"),
    }
    answers = {name: getattr(rest, name)(*args) for name, args in calls.items()}
    for name, args in calls.items():
        if (("RestClient", f"{name}_async")) in public_methods():
            getattr(rest, f"{name}_async")(*args)
    rest.get_server_capabilities(), rest.get_telemetry()
    assert answers["get_training_run"].last_checkpoint.tinker_path == state
    assert answers["get_training_run"].lora_rank == 4
    assert {c.tinker_path for c in answers["list_checkpoints"].checkpoints} >= {state, sampled, external}
    assert run in answers["get_session"].training_run_ids
    assert rest.get_weights_info_by_tinker_path(state).lora_rank == 4
    for copied in (service.copy_weights(state), answers["copy_weights"]):
        assert rest.get_weights_info_by_tinker_path(copied).train_mlp
    with urllib.request.urlopen(answers["get_external_weights_urls"].urls["adapter_config.json"]) as answer:
        assert b'"peft_type": "LORA"' in answer.read()
    wanted = {"display_name": "method EVERY", "user_metadata": {"run": "7"}}
    found = rest.search_sessions(types.SessionSearchRequest(**wanted))
    assert [summary.session_id for summary in found.sessions] == [session]
    rest.delete_checkpoint_from_tinker_path(sampled), rest.delete_checkpoint(run, "sampler_weights/b")
    rest.delete_checkpoint_from_tinker_path_async(external), rest.delete_checkpoint_async(run, "external_weights/b")
    assert "sampler" not in {c.checkpoint_type for c in rest.list_checkpoints(run).checkpoints}

    for name in sorted(UNSUPPORTED["RestClient"]):
        arguments = {"get_billing": ("2026-01-01", "2026-01-02"), "export_sess": (session,)}.get(name[:11], ())
        with pytest.raises((tinker.NotFoundError, RuntimeError), match=r"does not support|JWT"):
            getattr(rest, name)(*arguments)
    service.close("success")
    assert public_methods() - CALLED == set()

    page = PAGE.read_text()
    named = {name.removesuffix("_async") for _, name in public_methods()}
    assert {name for name in named if f"`{name}`" not in page} == set()
    refused = page.split("Unsupported:")[1].split("\n\n")[0]
    expected = {name.removesuffix("_async") for name in UNSUPPORTED["RestClient"]}
    assert {name for name in named if f"`{name}`" in refused} == expected
