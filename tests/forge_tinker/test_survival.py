"""Kills of the server, and tenants beside each other: nothing is lost, applied twice, seen or disturbed."""

import random
import threading
import time

import numpy as np
import pytest
import tinker

from .conftest import encode, make_datum, serve

pytestmark = [pytest.mark.processes, pytest.mark.full]

WORDS = ["abc", "fgh", "xyz", "kmw"]
SETTINGS = {"max_tokens": 3, "temperature": 1.0}


def train(url, key, steps=4, seed=0, pause=lambda: None):
    """Train a little by samples of the own weights; the log-probabilities of every pass, and the drawn tokens."""
    record = []
    with tinker.ServiceClient(base_url=url, api_key=key) as service:
        client = service.create_lora_training_client("the model", rank=4, seed=seed).result()
        for step in range(steps):
            sampler = client.save_weights_and_get_sampling_client().result()
            drawn = []
            for word in WORDS:
                prompt = tinker.ModelInput.from_ints(encode(f"{word}>"))
                drawn.append(sampler.sample(prompt, 4, tinker.SamplingParams(seed=step + seed, **SETTINGS)))
                pause()
            tokens = [sequence.tokens for future in drawn for sequence in future.result().sequences]
            data = [make_datum(f"{word}>{word[::-1]}", 4) for word in WORDS]
            passes = [client.forward_backward(part, "cross_entropy") for part in (data[:2], data[2:])]
            pause()
            client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
            logprobs = [output["logprobs"].to_numpy() for f in passes for output in f.result().loss_fn_outputs]
            record.append((tokens, logprobs))
        path = client.save_state("end").result().path
        client.forward([make_datum("abc>cba", 4)], "cross_entropy").result()
    return record, path


def assert_equal_runs(first, second):
    for (tokens, logprobs), (other_tokens, other_logprobs) in zip(first, second, strict=True):
        assert tokens == other_tokens
        for values, others in zip(logprobs, other_logprobs, strict=True):
            np.testing.assert_array_equal(values, others)


def test_killed_server_resumes_with_equal_bits(base_model, tmp_path):
    with serve(base_model, tmp_path / "whole", "--name", "the model") as server:
        expected, _ = train(server.url, "tml-a", steps=10)
    first, last = (np.mean([values[-3:] for values in logprobs]) for _, logprobs in (expected[0], expected[-1]))
    assert last > first + 0.5  # it has learned

    generator = random.Random(0)
    with serve(base_model, tmp_path / "killed", "--name", "the model") as server:
        done = threading.Event()

        def kill_at_random():
            for _ in range(2):
                time.sleep(generator.uniform(0.3, 1.5))
                if done.is_set():
                    return
                server.kill()
                server.start()

        killer = threading.Thread(target=kill_at_random)
        killer.start()
        actual, _ = train(server.url, "tml-a", steps=10)
        done.set()
        killer.join()
        assert_equal_runs(expected, actual)


def test_concurrent_tenants_get_equal_bits_and_no_foreign_rows(base_model, tmp_path):
    tenants = [f"tml-{letter}" for letter in "abc"]
    keys = "".join(f"  {key}: {{project: {key}, max_adapters: 2, max_bytes: 100000000}}\n" for key in tenants)
    (tmp_path / "tenants.yaml").write_text(f"tenants:\n{keys}")
    options = ("--name", "the model", "--config", str(tmp_path / "tenants.yaml"))
    with serve(base_model, tmp_path / "server", *options) as server:
        alone = [train(server.url, key, seed=seed)[0] for seed, key in enumerate(tenants)]
        generator = random.Random(1)
        results = {}

        def run(seed, key):
            results[key] = train(server.url, key, seed=seed, pause=lambda: time.sleep(generator.uniform(0, 0.02)))

        threads = [threading.Thread(target=run, args=pair) for pair in enumerate(tenants)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for key, expected in zip(tenants, alone, strict=True):
            assert_equal_runs(expected, results[key][0])

        # Another tenant's checkpoint is as if it did not exist, until it is published.
        path = results["tml-a"][1]
        with tinker.ServiceClient(base_url=server.url, api_key="tml-b") as other:
            with pytest.raises(tinker.APIStatusError, match="there is no checkpoint"):
                other.create_sampling_client(path).result()
            rest = tinker.RestClient(base_url=server.url, api_key="tml-b")
            assert path not in {c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints}
            own = tinker.RestClient(base_url=server.url, api_key="tml-a")
            own.publish_checkpoint_from_tinker_path(path).result()
            other.create_training_client_from_state(path).result()
            other.create_lora_training_client("the model", rank=4).result()
            with pytest.raises(tinker.APIStatusError, match="its quota"):
                other.create_lora_training_client("the model", rank=4).result()
        with pytest.raises(tinker.AuthenticationError, match="missing or wrong"):
            tinker.RestClient(base_url=server.url, api_key="tml-x").list_sessions().result()
