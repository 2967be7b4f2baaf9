"""What counts as a secret, by place, name and looks, and what does not."""

import logging
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies as st

from forge.cli import main
from forge.config import Arguments, ConfigError, build
from forge.models.hub import write_card
from forge.observability.console import configure_logging
from forge.observability.run import Run
from forge.recipes.resume import find_changes, read_config
from forge.recipes.rl_config import RLConfig
from forge.system.masking import MASK, mask_secrets, masked_names, without_secrets
from forge_inspect.watch.report import write_report

SECRET_NAMES = [
    *(
        "api_key",
        "apiKey",
        "API-KEY",
        "apikey",
        "accessToken",
        "hf_token",
        "HF_TOKEN",
        "token",
        "passwd",
        "db_password",
    ),
    *("client_secret", "aws_secret_access_key", "AWS_ACCESS_KEY_ID", "Authorization", "X-Api-Key", "WANDB_API_KEY"),
    *("github_pat", "ssh_key", "private_key", "credentials", "Cookie", "auth", "connectionString", "webhook_url"),
]
PLAIN_NAMES = [
    *("max_tokens", "tokens_per_second", "tokenizer", "eos_token_id", "pad_token", "stop_token", "num_key_value_heads"),
    *("author", "keyboard", "monkey", "primary_key", "sort_key", "prompt_key", "api_key_env", "passage", "pass_at_k"),
    *("public_key", "secretary", "thinking_tokens", "loss_per_token", "cookiecutter", "token_ids", "special_tokens"),
]
SECRET_TEXTS = [
    *("postgresql://u:S3K@h/db", "https://u:S3K@host/x?a=1", "https://S3K@github.com/x", "redis://:S3K@h:6379/0"),
    *("https://h?password=S3K", "https://h/x?token=S3K", "https://h/x?X-Amz-Signature=S3K&b=2", "https://h/x?sig=S3K"),
    *("Bearer S3K", "Authorization: Basic S3K=", "Cookie: a=S3K; b=S3K", "curl -H 'X-Api-Key: S3K'"),
    *("sk-proj-S3Kabcdefgh12", "hf_S3KabcdefghijK", "ghp_S3Kabcdefghi", "AKIAS3KABCDEFGHIJKLM", "xoxb-1234-S3Kabc12"),
    *("-----BEGIN RSA PRIVATE KEY-----\nS3K\n-----END RSA PRIVATE KEY-----", "eyJhbGciOi.eyJzdS3Kb.S3K"),
    *("--api-key=S3K", '{"api_key": "S3K"}', "password=S3K", "PASSWORD='S 3K S3K'", "export HF_TOKEN=S3K"),
    *("url=https://h/x?token=S3K", "--env MY_TOKEN=S3K --secret OTHER_KEY=S3K", "WANDB_API_KEY: S3Kabcdef0123"),
]
PLAIN_TEXTS = [
    *("the secret: practise every day", "client_secret: must be set", "key: step_000012", "sort(key='length')"),
    *("https://host:8080/v1/models", "https://huggingface.co/org/m@main", "registry/forge:0.1@sha256:abcd", "a@b.c"),
    *("max_tokens=512", "apps.toys.words:Reverse", "the bearer of bad news", "<|im_end|>", "key: value", "token: 5"),
    *("hf_hub_download", "sk-learn", "org/model@refs/pr/1", "--training.steps 3 --run.name tiny", "Basic arithmetic"),
]


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_config_values_with_secret_names_are_masked(name: str):
    for shown in (name, name.upper(), f"services.reward.{name}"):
        assert without_secrets({shown: "S3K"}) == {shown: MASK}
    assert without_secrets({"judge": [{name: ["S3K"]}]}) == {"judge": [{name: [MASK]}]}
    assert without_secrets({name: None}) == {name: None}


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_config_values_with_harmless_names_are_not_masked(name: str):
    for value in ("plain", 7, ["a", "b"], {"a": "b"}, True):
        assert without_secrets({name: value}) == {name: value}


@pytest.mark.parametrize("text", SECRET_TEXTS)
def test_secrets_inside_text_are_masked(text: str):
    for shown in (text, f"could not reach {text}", f"{text}\nafter it", f"({text})"):
        assert "S3K" not in mask_secrets(shown)
    assert mask_secrets(mask_secrets(text)) == mask_secrets(text)


REPEATED = """
import resource
from forge.system.masking import mask_secrets
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
words = "a= a[= :// ://' --a a=b; eyJ sk- token= a. url=h?url= a:b@ a-a: -----BEGIN".split()
for text in [*words, '"a":"', "Bearer ", "key= "]:
    mask_secrets(text * 200_000)
"""


@pytest.mark.processes
@pytest.mark.full
def test_secret_masking_takes_linear_time():
    """Hours, if it were that to its square: the process is ended by its limit of CPU time."""
    done = subprocess.run([sys.executable, "-c", REPEATED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_texts_without_secrets_are_not_masked(text: str):
    assert mask_secrets(text) == text
    assert without_secrets({"system_prompt": [text]}) == {"system_prompt": [text]}


@pytest.mark.parametrize("place", ["env", "environment", "environ", "headers", "extra_headers", "env_vars", "cookies"])
def test_secret_environment_and_header_values_are_masked(place: str):
    values = {"A": "S3K", "B": 3, "C": True, "D": None, "E": ["S3K", {"F": "S3K"}]}
    hidden = {"A": MASK, "B": MASK, "C": MASK, "D": None, "E": [MASK, {"F": MASK}]}
    assert without_secrets({"x": [{place: values}]}) == {"x": [{place: hidden}]}
    assert "S3K" not in str(without_secrets({place: [["X-Thing", "S3K"], "A=S3K"]}))
    assert without_secrets("S3K", f"services.x.{place}.A") == MASK


@given(st.text(), st.text(min_size=4, alphabet="S3K"))
def test_url_password_is_masked_in_any_text(text: str, password: str):
    assert password not in mask_secrets(f"{text} postgresql://user:{password}@host/x").replace(text, "")


def test_masked_names_returns_masked_setting_keys():
    config = {
        "stop": [MASK], "system_prompt": "*** Rules ***", "services": {"x": {"env": {"A": "S3K"}}},
        "argv": ["--token", "S3K"], "url": "https://user:S3K@host", "other": "hf_S3KabcdefghijK",
        "bearer": {"is": "S3K"}, "empty": {"password": None},
    }  # fmt: skip
    assert [*masked_names(without_secrets(config))] == ["services.x.env.A", "argv", "url", "other", "bearer.is"]
    assert not [*masked_names(config)]


def shown_in(folder: Path, secret: str) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path.relative_to(folder)) for path in files if secret.encode() in path.read_bytes()]


def test_run_directory_is_private_and_contains_no_secrets(tmp_path: Path):
    config = {
        "run": {"name": "one"}, "services": {"reward": {"env": {"MY_TOKEN": "SEKRET"}}},
        "reward": {"judges": [{"url": "https://user:SEKRET@host/v1", "api_key_env": "KEY"}]},
    }  # fmt: skip
    old = os.umask(0o022)
    try:
        run = Run("one", config, steps=1, root=str(tmp_path))
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


def a_config(**more: Any) -> dict[str, Any]:
    return {"model": "m", "dataset": {"task": "apps.toys.words:Reverse"}, **more}


def test_resuming_with_masked_secret_setting_raises(tmp_path: Path):
    secret = a_config(services={"reward": {"env": {"MY_TOKEN": "SEKRET"}}})
    run = Run("one", secret, steps=1, root=str(tmp_path))
    run.close()
    again = ["--resume", str(run.folder)]
    with pytest.raises(ConfigError, match=r"\A[^\n]*services\.reward\.env\.MY_TOKEN masked[^\n]*\Z"):
        read_config(RLConfig, Arguments.parse(again))
    given_again = [*again, "--services.reward.env.MY_TOKEN", "OTHER"]
    assert read_config(RLConfig, Arguments.parse(given_again)).services.reward.env == {"MY_TOKEN": "OTHER"}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(secret | {"run": {"name": "one", "root": str(tmp_path)}}))
    config = read_config(RLConfig, Arguments.parse([*again, "--config", str(tmp_path / "own.yaml")]))
    assert config.services.reward.env == {"MY_TOKEN": "SEKRET"}


def test_masked_secrets_do_not_count_as_changed_settings():
    before = {"services.reward.env.A": MASK, "reward.api_key": MASK, "seed": 1}
    config = build(RLConfig, a_config(services={"reward": {"env": {"A": "SEKRET"}}}, seed=2))
    names = [name for name, _, _ in find_changes(before, config)]
    assert "seed" in names
    assert not {"services.reward.env.A", "reward.api_key"} & {*names}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--services.reward.env", "{A: SEKRET"], "must be a mapping"),
        (["--services.reward.env", "{A: 1}", "SEKRET}"], "unexpected argument"),
        (["--services.reward.env.A", "[SEKRET]"], "must be text"),
        (["--training.steps", "https://u:SEKRET@h"], "whole number"),
    ],
)
def test_config_error_message_does_not_show_secret(words: list[str], message: str, tmp_path: Path):
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(a_config()))
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(RLConfig, Arguments.parse(["--config", str(tmp_path / "own.yaml"), *words]))
    assert "SEKRET" not in str(caught.value)


def test_log_line_does_not_show_secret(capsys: pytest.CaptureFixture[str]):
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
def test_launcher_arguments_with_secret_raise(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match=r"\Aerror: --[^\n]* holds a secret[^\n]*\Z") as caught:
        main(["launch", "slurm", "tests/forge_cluster/tiny.yaml", "--dry-run", *words])
    assert "SEKRET" not in str(caught.value) + capsys.readouterr().out
    main(["launch", "slurm", "tests/forge_cluster/tiny.yaml", "--dry-run", "--setup", "export HF_TOKEN=$(cat ~/token)"])
    assert "export HF_TOKEN=$(cat ~/token)\n" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.processes
def test_traceback_does_not_show_secret(tmp_path: Path):
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


def test_values_of_secret_variables_are_masked_in_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_API_KEY", "quite-ordinary")
    monkeypatch.setenv("PWD", "/home/me/project")
    assert mask_secrets("no answer with quite-ordinary") == f"no answer with {MASK}"
    assert mask_secrets("model in /home/me/project/runs") == "model in /home/me/project/runs"
