"""What counts as a secret, by place, name and looks, and what does not."""

from __future__ import annotations

import io
import json
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from forge.cli import main
from forge.config import Arguments, ConfigError, build
from forge.models.hub import write_card
from forge.observability.console import configure_logging
from forge.observability.run import Run
from forge.recipes.resume import changes, read_config
from forge.recipes.rl_config import RLConfig
from forge.system.masking import MASK, MaskedStream, masked, masked_names, without_secrets
from forge_inspect.watch.report import write_report

# fmt: off
SECRET_NAMES = [
    "github_pat", "GITHUB_PAT", "slack_webhook", "webhook_url", "otp", "totp", "pgpass", "openaikey", "conn_str",
    "seed_phrase", "mnemonic", "sas", "sas_url", "service_account_json",
    "apikey", "apiKey", "api_key", "api_keys", "API-KEY", "ApiKey", "accessToken", "access_token", "passwd",
    "passphrase", "keys", "tokens", "token", "key", "auth", "bearer", "credentials", "Cookie", "Set-Cookie",
    "X-Auth", "X-Auth-Token", "private_key_pem", "secret", "client_secret", "clientSecret", "aws_secret_access_key",
    "AWS_ACCESS_KEY_ID", "hf_token", "HF_TOKEN", "password", "db_password", "dbPassword", "Authorization",
    "Proxy-Authorization", "X-Api-Key", "OPENAI_API_KEY", "WANDB_API_KEY", "openai_key", "github_token",
    "GITHUB_PAT_TOKEN", "refresh_token", "refreshToken", "id_token", "session_token", "sessionToken", "csrfToken",
    "secret_key", "secretKey", "secretkey", "privateKey", "ssh_key", "encryption_key", "signing_key", "pwd", "pass",
    "user_pass", "authToken", "auth_token", "oauth_token", "oauth", "webhook_secret", "passwords", "secrets",
    "api_tokens", "auth_tokens", "access_tokens", "bot_token", "SLACK_BOT_TOKEN", "jwt", "cred", "creds",
    "credential", "connectionString", "passwort", "account_key", "subscription_key", "Ocp-Apim-Subscription-Key",
    "master_key", "service_account_key", "access_key", "hub_token", "APIKEY", "ACCESSTOKEN", "rootPassword",
    "MYSQL_PWD", "PGPASSWORD", "x-goog-api-key", "bearer_token", "basic_auth", "http_auth", "secret_token",
    "private_key", "login_password", "mysecret", "SecretAccessKey", "sas_token",
]
# fmt: on
# fmt: off
PLAIN_NAMES = [
    "max_tokens", "tokens_per_second", "tokenizer", "num_tokens", "eos_token_id", "pad_token", "keyframes",
    "monkey", "author", "key_value_heads", "num_key_value_heads", "special_tokens", "stop_tokens", "kv_heads",
    "authors", "authority", "authored", "keyboard", "keynote", "turkey", "tokenize", "tokenization",
    "tokenizer_path", "token_budget", "token_count", "token_ids", "stop_token_ids", "bos_token", "unk_token",
    "cls_token", "sep_token", "mask_token", "max_new_tokens", "batch_tokens", "max_prompt_tokens", "prompt_tokens",
    "completion_tokens", "total_tokens", "added_tokens", "additional_special_tokens", "image_token_id",
    "token_level", "token_type_ids", "primary_key", "sort_key", "foreign_key", "cache_key", "label_key",
    "reward_fn_key", "prompt_key", "answer_key", "api_key_env", "compass", "passage", "bypass", "passes", "passed",
    "key_size", "secretary", "cookiecutter", "pad_token_id", "hidden_size", "keys_per_second", "output_tokens",
    "tokens_per_step", "n_tokens", "keyword", "keywords", "key_dim", "num_keys", "public_key", "secretion",
    "tokenizer_name", "token_weights", "author_email", "authentic", "bearing", "min_tokens", "start_token",
    "end_token", "think_token", "thinking_tokens", "keypoints", "pass_at_k", "pass_rate", "first_pass", "hockey",
    "donkey", "whiskey", "loss_per_token", "per_token",
]
# fmt: on
SECRET_TEXTS = [
    "postgresql://u:S3K/w@h",
    "postgresql://u:p@S3K@h/db",
    "https://u:S3K@host/x?a=1",
    "https://h/x?sig=S3K",
    "https://h?password=S3K",
    "https://h/x?X-Amz-Signature=S3K&b=2",
    "https://h/x?token=S3K",
    "Bearer S3K",
    "sk-S3Kabcdefgh12",
    "sk-proj-S3Kabcdefgh12",
    "hf_S3KabcdefghijK",
    "ghp_S3Kabcdefghi",
    "AKIAS3KABCDEFGHIJKLM",
    "xoxb-1234-S3Kabc12",
    "-----BEGIN RSA PRIVATE KEY-----\nS3K\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY-----\\nS3K",
    "eyJhbGciOi.eyJzdS3Kb.S3K",
    "redis://:S3K@h:6379/0",
    "mongodb+srv://u:S3K@c.x/d",
    "Authorization: Basic S3K=",
    "Cookie: a=S3K; b=S3K",
    "--api-key=S3K",
    '{"api_key": "S3K"}',
    "AccountName=x;AccountKey=S3K==;E=y",
    "Server=h;Password=S3K;",
    "https://h/x?%70assword=S3K",
    "https://h#access_token=S3K",
    "password=S3K",
    "PASSWORD='S 3K S3K'",
    "https://S3K@github.com/x",
    "git+https://ghp_x:S3K@github.com/o/r",
    "https://h/?X-Goog-Signature=S3K",
    "https://h/?api_key=S3K&x=1",
    "wss://h/?auth=S3K",
    "export HF_TOKEN=S3K",
    "curl -H 'X-Api-Key: S3K'",
    "{'Authorization': 'Token S3K'}",
    "https://h/x?AWSAccessKeyId=S3K",
    "https://user:S3K#x@host/p",
    "basic c2VjcmV0OlMzSzEyMw==S3K",
    "amqp://g:S3K?@h/v",
    "jdbc:postgresql://h/db?user=x&password=S3K",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nS3K",
    "-----BEGIN PGP PRIVATE KEY BLOCK-----\nS3K\n-----END PGP PRIVATE KEY BLOCK-----",
    "github_pat_S3K11ABCDEFG",
    "glpat-S3Kabcdefgh1",
    "AIzaS3KabcdefghIJK",
]
SECRET_TEXTS += [  # of others' reports
    "Client error '403 Forbidden' for url 'https://mcp.example/mcp?api_key='S3K-abc123''",
    "403, message='Forbidden', url='https://api.example/v3?api_key=S3KAbCd&format=json'",
    "https://h/it'works/x?token=S3K",
    "https://user:p'S3K@h/x",
    'https://user:S3K"x@h/',
    "url=https://h/x?token=S3K",
    "--env MY_TOKEN=S3K --secret OTHER_KEY=S3K",
    "Updating database tables at postgres://postgres:S3K@example.com:5432/postgres",
    "https://hooks.slack.com/services/T000/B000/S3KabcdefS3K",
    "https://discord.com/api/webhooks/123/S3KabcdefS3K",
    "callback=https://a.b/c?next=https://u:S3K@d.e/f",
]
SECRET_TEXTS += [  # given to programs, and in forms that several providers have
    "sshpass -p S3Kabc123 ssh host",
    "mysql -uroot -pS3Kabc123 db",
    "curl -u user:S3Kabc123 https://h/x",
    "curl --user user:S3Kabc123 https://h/x",
    "machine github.com login me password S3Kabc123",
    "https://h/x;jsessionid=S3K123abc",
    "xai-S3Kabcdefgh1234567890",
    "fw_S3Kabcdefgh12345678",
    "tgp_v1_S3Kabcdefgh12345678",
    "csk-S3Kabcdefgh12345678",
    "sk_S3Kabcdefgh12345678abcdef0123",
    "key-S3Kabcdef0123456789abcdef01234567",
    "AGE-SECRET-KEY-1S3KQQQQQQQQQQQQQQ",
    "token='S3Kabc123'",
    "WANDB_API_KEY: S3Kabcdef0123",
    "secret: S3Kabcdef0123",
    "client_secret: S3Kabcdef0123",
    "Token: S3Kabcdef0123",
    "X-Goog-Api-Key: S3Kabcdef0123",
    "Ocp-Apim-Subscription-Key: S3Kabcdef0123",
]
PLAIN_TEXTS = [
    "docker run -u 1000:1000 --user 0:0 x",
    "the secret: practise every day",
    "judges[0].api_token: must be text",
    "client_secret: must be set",
    "key: step_000012",
    "sort(key='length')",
    "sk_learn_2",
    "fw_layer_norm1",
    "xai-grok-4",
    "key-value",
    "please login as me",
    "['http://h1:80/v1', 'http://h2:80/v1']",
    "x = {'a': 'b@c'}",
    "https://host/x",
    "https://host:8080/v1/models",
    "https://huggingface.co/org/m@main",
    "task-based-learning-method-12345678",
    "registry/forge:0.1@sha256:abcd",
    "forge:0.1@sha256:abcd",
    "max_tokens=512",
    "tokens=5",
    "apps.toys.words:Reverse",
    "Answer key: 42",
    "sort(key=len)",
    "the bearer of bad news",
    "a@b.c",
    "mail a@b.c or b@c.d",
    "<|im_end|>",
    "risk-adjusted-return-of-2024",
    "file:///a/b",
    "key: value",
    "token: 5",
    "https://h/x?page=2&sort=key",
    "?max_tokens=5",
    "{question}\n\nAnswer:",
    "lr=1e-6, eos_token_id=2",
    "sklearn",
    "hf_hub_download",
    "hf_transfer_enabled",
    "sk-learn",
    "s3://bucket/key=1/x",
    "org/model@refs/pr/1",
    "--training.steps 3 --run.name tiny",
    "--max-tokens 5",
    "author=me",
    "You keep secrets: never tell.",
    "[SEP]",
    "passage: 1=2",
    "basic arithmetic",
    "Basic arithmetic",
    "https://h:80/a b@c",
]


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_a_value_is_masked_by_its_name(name: str):
    for shown in (name, name.upper(), f"services.reward.{name}"):
        assert without_secrets({shown: "S3K"}) == {shown: MASK}
    assert without_secrets({"judge": [{name: ["S3K"]}]}) == {"judge": [{name: [MASK]}]}
    assert without_secrets({name: None}) == {name: None}


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_a_harmless_name_is_left_alone(name: str):
    for value in ("plain", 7, ["a", "b"], {"a": "b"}, True):
        assert without_secrets({name: value}) == {name: value}


@pytest.mark.parametrize("text", SECRET_TEXTS)
def test_a_secret_within_a_text_is_masked(text: str):
    for shown in (text, f"could not reach {text}", f"{text}\nafter it", f"({text})"):
        assert "S3K" not in masked(shown)
    assert masked(masked(text)) == masked(text)


@pytest.mark.parametrize(
    "text",
    [
        "--api-key S3K",
        "forge train x --services.reward.env '{A: S3K}'",
        "--services.reward.env.MY S3K",
        "--password S3K",
    ],
)
def test_the_value_of_an_option_in_a_command_is_masked(text: str):
    assert "S3K" not in str(without_secrets({"command": text}))


@pytest.mark.parametrize("text", ["u:S3K@h", "user:S3K@proxy.example:3128", "user:p@S3K@h"])
def test_a_value_that_is_user_and_password_is_masked(text: str):
    assert "S3K" not in str(without_secrets({"proxy": text}))


@pytest.mark.parametrize(
    "text", ['{"headers": {"X-Thing": "S3K"}}', '[{"api_key": "S3K"}]', '{"env": {"A": ["S3K"]}, "n": 1}'], ids=range(3)
)
def test_a_text_that_is_json_is_masked_as_its_data(text: str):
    shown = without_secrets({"body": text, "plain": '{"a": 1.50}'})
    assert "S3K" not in shown["body"]
    assert json.loads(shown["body"]).keys() if text[0] == "{" else json.loads(shown["body"])
    assert shown["plain"] == '{"a": 1.50}'


REPEATED = """
import resource
from forge.system.masking import masked
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
words = "a= a[= :// ://' --a a=b; eyJ sk- token= a. url=h?url= a:b@ a-a: -----BEGIN".split()
for text in [*words, '"a":"', "Bearer ", "key= "]:
    masked(text * 200_000)
"""


@pytest.mark.processes
def test_a_long_text_takes_a_time_in_proportion_to_its_length():
    """Hours, if it were that to its square: the process is ended by its limit of CPU time."""
    done = subprocess.run([sys.executable, "-c", REPEATED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_a_harmless_text_is_left_alone(text: str):
    assert masked(text) == text
    assert without_secrets({"system_prompt": [text]}) == {"system_prompt": [text]}


@pytest.mark.parametrize("place", ["env", "environment", "environ", "headers", "extra_headers", "env_vars", "cookies"])
def test_all_values_of_an_environment_or_of_headers_are_masked(place: str):
    values = {"A": "S3K", "B": 3, "C": True, "D": None, "E": ["S3K", {"F": "S3K"}]}
    hidden = {"A": MASK, "B": MASK, "C": MASK, "D": None, "E": [MASK, {"F": MASK}]}
    assert without_secrets({"x": [{place: values}]}) == {"x": [{place: hidden}]}
    assert "S3K" not in str(without_secrets({place: [["X-Thing", "S3K"], "A=S3K"]}))
    assert without_secrets("S3K", f"services.x.{place}.A") == MASK


def test_what_is_near_a_secret_stays():
    config = {
        "environment": "apps.x:Make", "eval_env": {"size": 3}, "token": True, "tokens": 3, "eos": {"token": "<|end|>"},
        "argv": ["run", "--api-key", "S3K", "--steps", "3"], "header": [{"name": "X-Api-Key", "value": "S3K"}],
    }  # fmt: skip
    assert without_secrets(config) == config | {
        "argv": ["run", "--api-key", MASK, "--steps", "3"], "header": [{"name": MASK, "value": MASK}],
    }  # fmt: skip


@given(st.text(), st.text(min_size=4, alphabet="S3K"))
def test_a_password_of_an_address_is_masked_in_any_text(text: str, password: str):
    assert password not in masked(f"{text} postgresql://user:{password}@host/x").replace(text, "")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
def test_masking_twice_is_masking_once(value: Any):
    once = without_secrets({"a": value, "env": {"B": value}})
    assert without_secrets(once) == once


def test_masks_are_found_again():
    config = {
        "stop": [MASK], "system_prompt": "*** Rules ***", "services": {"x": {"env": {"A": "S3K"}}},
        "argv": ["--token", "S3K"], "url": "https://user:S3K@host", "other": "hf_S3KabcdefghijK",
        "bearer": {"is": "S3K"}, "empty": {"password": None},
    }  # fmt: skip
    names = [*masked_names(without_secrets(config))]
    assert names == ["services.x.env.A", "argv", "url", "other", "bearer.is"]
    assert not [*masked_names(config)]


def shown_in(folder: Path, secret: str) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path.relative_to(folder)) for path in files if secret.encode() in path.read_bytes()]


def test_a_run_folder_has_no_secret_and_is_its_owners_alone(tmp_path: Path):
    config = {
        "run": {"name": "one"}, "services": {"reward": {"env": {"MY_TOKEN": "SEKRET"}}},
        "reward": {"judges": [{"url": "https://user:SEKRET@host/v1", "api_key_env": "KEY"}]},
    }  # fmt: skip
    old = os.umask(0o022)
    try:
        run = Run("one", config, steps=1, root=str(tmp_path), report=write_report)
    finally:
        os.umask(old)
    run.history.append({"step": 0.0})
    run.fail("ValueError: https://user:SEKRET@host", "Authorization: Bearer SEKRET")
    run.close()
    write_report(run.folder)
    (run.folder / "model").mkdir()
    write_card(run.folder / "model", "grpo", config, [])
    assert {"config.yaml", "report.html", "ended.txt", "model/README.md"} <= {*shown_in(run.folder, MASK)}
    assert shown_in(run.folder, "SEKRET") == []
    assert stat.S_IMODE(run.folder.stat().st_mode) == 0o700


def test_the_report_of_an_earlier_version_has_no_secret(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("services: {reward: {env: {MY_TOKEN: SEKRET}}}")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    write_report(tmp_path)
    assert shown_in(tmp_path, "SEKRET") == ["config.yaml"]


def a_config(**more: Any) -> dict[str, Any]:
    return {"model": "m", "dataset": {"task": "apps.toys.words:Reverse"}, **more}


def test_a_resumed_run_is_not_given_a_mask(tmp_path: Path):
    secret = a_config(services={"reward": {"env": {"MY_TOKEN": "SEKRET"}}})
    run = Run("one", secret, steps=1, root=str(tmp_path))
    run.close()
    again = ["--resume", str(run.folder)]
    with pytest.raises(ConfigError, match=r"\A[^\n]*services\.reward\.env\.MY_TOKEN, which is masked[^\n]*\Z"):
        read_config(RLConfig, Arguments.parse(again))
    given_again = [*again, "--services.reward.env.MY_TOKEN", "OTHER"]
    assert read_config(RLConfig, Arguments.parse(given_again)).services.reward.env == {"MY_TOKEN": "OTHER"}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(secret | {"run": {"name": "one", "root": str(tmp_path)}}))
    config = read_config(RLConfig, Arguments.parse([*again, "--config", str(tmp_path / "own.yaml")]))
    assert config.services.reward.env == {"MY_TOKEN": "SEKRET"}


def test_what_is_masked_is_no_change_of_a_run():
    before = {"services.reward.env.A": MASK, "reward.api_key": MASK, "seed": 1}
    config = build(RLConfig, a_config(services={"reward": {"env": {"A": "SEKRET"}}}, seed=2))
    names = [name for name, _, _ in changes(before, config)]
    assert "seed" in names
    assert not {"services.reward.env.A", "reward.api_key"} & {*names}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--services.reward.env", "{A: SEKRET"], "must be a mapping"),
        (["--services.reward.env", "{A: 1}", "SEKRET}"], "did not understand"),
        (["--services.reward.env.A", "[SEKRET]"], "must be text"),
        (["--training.steps", "https://u:SEKRET@h"], "whole number"),
    ],
)
def test_an_error_has_no_secret(words: list[str], message: str, tmp_path: Path):
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(a_config()))
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(RLConfig, Arguments.parse(["--config", str(tmp_path / "own.yaml"), *words]))
    assert "SEKRET" not in str(caught.value)


def test_a_log_line_has_no_secret(capsys: pytest.CaptureFixture[str]):
    configure_logging()
    handler = logging.getLogger("forge").handlers[0]
    handler.handle(logging.makeLogRecord({"name": "forge.x", "msg": "no answer of redis://:%s@h", "args": ("SEKRET",)}))
    assert "no answer of redis://***@h" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.parametrize(
    "words",
    [
        ["--services.reward.env", "{MY_TOKEN: SEKRET}"],
        ["--services.reward.env.MY_TOKEN", "SEKRET"],
        ["--setup", "export HF_TOKEN=SEKRET"],
        ["--sweep", "services.reward.env.MY_TOKEN=SEKRET,SEKRET2"],
    ],
)
def test_a_launcher_takes_no_secret_among_its_words(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match=r"\Aerror: --[^\n]* holds a secret[^\n]*\Z") as caught:
        main(["launch", "slurm", "tests/runtime/cluster/tiny.yaml", "--dry-run", *words])
    assert "SEKRET" not in str(caught.value) + capsys.readouterr().out
    main(
        ["launch", "slurm", "tests/runtime/cluster/tiny.yaml", "--dry-run", "--setup", "export HF_TOKEN=$(cat ~/token)"]
    )
    assert "export HF_TOKEN=$(cat ~/token)\n" in capsys.readouterr().out


def test_a_secret_that_is_written_in_parts_is_masked():
    written = io.StringIO()
    stream = MaskedStream(written)
    for part in ("no answer of https://us", "er:SEK", "RET@host\nnext ", "line: Bearer SEK", "RET"):
        assert stream.write(part) == len(part)
    stream.flush()
    assert written.getvalue() == "no answer of https://***@host\nnext line: Bearer ***"


@pytest.mark.processes
def test_a_traceback_has_no_secret(tmp_path: Path):
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(a_config()))
    code = """
import sys
from forge.recipes import launch
def broken(*_, **__): raise RuntimeError("no answer of https://user:SEKRET@host")
launch.read_config = broken
launch.user_frames = lambda error: []
launch.launch(None, None, [])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "RuntimeError: no answer of https://***@host" in done.stderr
    assert "SEKRET@" not in done.stderr.replace('"no answer of https://user:SEKRET@host"', "")
