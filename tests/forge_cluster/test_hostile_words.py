"""No value of a configuration, name, path or host is another line, option or command of what a launcher writes: parsers
and shells that know nothing of this library say what they read."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from forge.cli import main
from forge_cluster.kubernetes import make_manifests
from forge_cluster.slurm import make_script
from forge_cluster.ssh import check_words_of_ssh, start_workers
from tests.forge_cluster.kube import expanded

HOSTILE = [
    "x\ntouch PWNED\n#",
    "x\r\ntouch PWNED\r\n",
    "$(touch PWNED)",
    "`touch PWNED`",
    "; touch PWNED;",
    "&& touch PWNED",
    "'; touch PWNED; '",
    '"; touch PWNED; "',
    "\\'; touch PWNED #",
    "${IFS}touch${IFS}PWNED",
    "$HOME $(FORGE_SECRET) $$(FORGE_SECRET) $$$(HOME) $",
    "-oProxyCommand=touch PWNED",
    "--wrap=touch PWNED",
    "-rf",
    "a\u2028touch PWNED\u2029",
    "a\x85touch PWNED\x0b\x0c",
    "!!python/object/apply:os.system [touch PWNED]",
    "&a [*a, *a]",
    "x: {y: z} # --- \n...\n---\n",
    "1e-6",
    "0o17",
    "yes",
    "~",
    "%j%A%x",
    "*",
    "!$",
    "{a,b}",
    "\x1b]0;touch PWNED\x07",
    "\ufeff-",
    "é \U0001f600",
    "\tx",
    " ",
    "",
    "x" * 10_000,
    "EOF\n#SBATCH --wrap=id",
]
ONE_LINE = r"\A[^\n]+\Z"


def attempted(function: Any, *given_values: Any) -> tuple[Any, str]:
    """What a function returns, and what its ValueError says."""
    try:
        return function(*given_values), ""
    except ValueError as error:
        return None, str(error)


def examples(function: Any) -> Any:
    for text in HOSTILE:
        function = example(text)(function)
    return function


def stub(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(0o755)


def recorded(script: str, folder: Path, **variables: str) -> list[list[str]]:
    """What a script starts, run by bash with programs that write down their words: `forge`, and all of Slurm's."""
    programs, log = folder / "programs", folder / "log"
    programs.mkdir(exist_ok=True)
    log.mkdir(exist_ok=True)
    for file in log.iterdir():
        file.unlink()
    stub(programs, "forge", f'printf \'%s\\0\' "$@" "$PWD" >{shlex.quote(str(log))}/$$')
    stub(programs, "srun", "exec true")
    stub(programs, "scontrol", "exec true")
    stub(programs, "squeue", "echo RUNNING")
    here = folder / "here"
    here.mkdir(exist_ok=True)
    own = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": "/nowhere", "LC_ALL": "C.UTF-8", **variables}
    done = subprocess.run(["bash"], input=script.encode(), env=own, cwd=here, capture_output=True, check=False)
    assert not any(folder.rglob("PWNED")), done
    return [file.read_bytes().decode().split("\0")[:-1] for file in log.iterdir()]


@pytest.mark.processes
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_slurm_script_preserves_hostile_arguments(text: str, tmp_path: Path):
    place = tmp_path / (re.sub(r"/", "", text)[:80] or "x")
    place.mkdir()
    script = make_script("run", [["forge", "train", text]], place, tmp_path / "runs")
    if text.isprintable() and len(text) < 200:
        script = make_script(text, [["forge", "train", text]], place, tmp_path / "runs" / text, time=text)
    found = recorded(script, tmp_path, SLURM_JOB_ID="1", SLURM_JOB_NUM_NODES="1")
    assert found == [["train", text, str(place)]]
    several = make_script("run", [["forge", "no"], ["forge", "train", text]], place, tmp_path / "runs")
    found = recorded(several, tmp_path, SLURM_JOB_ID="1", SLURM_JOB_NUM_NODES="1", SLURM_ARRAY_TASK_ID="1")
    assert found == [["train", text, str(place)]]


@examples
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_kubernetes_manifest_preserves_hostile_arguments(text: str):
    manifests = make_manifests("run", ["python", "-m", "forge", text], "r/forge:1", claim="shared", secret="s")
    [container] = manifests[-1]["spec"]["template"]["spec"]["containers"]
    variables = {variable["name"]: variable.get("value", "SEKRET") for variable in container["env"]}
    assert expanded(container["command"], variables) == ["python", "-m", "forge", text]


@pytest.mark.parametrize("name", ["Run", "9run", "a_b", "a.b", "-a", "a-", "", "a" * 45, "é", "a\n", "a b", "a/../b"])
def test_invalid_kubernetes_name_raises_one_line_error(name: str):
    with pytest.raises(ValueError, match=r"\A[^\n]*set run\.name to at most 44[^\n]*\Z"):
        make_manifests(name, ["forge"], "r/forge:1")


def test_kubernetes_manifest_drops_pod_privileges():
    manifests = make_manifests("run", ["forge"], "r/forge:1", claim="shared", secret="of-the-run")
    pods = [m["spec"]["template"]["spec"] for m in manifests if m["kind"] in ("Job", "StatefulSet")]
    assert len(pods) == 2
    for pod in pods:
        assert pod["automountServiceAccountToken"] is False
        assert {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}.items() <= pod[
            "securityContext"
        ].items()
        assert pod["securityContext"]["runAsUser"] > 0
        for container in pod["containers"]:
            rights = container["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert rights["readOnlyRootFilesystem"] is True
            assert {"/tmp", "/dev/shm"} <= {mount["mountPath"] for mount in container["volumeMounts"]}
    secret, *others = map(str, manifests)
    assert "of-the-run" in secret
    assert "of-the-run" not in "".join(others)


@examples
@given(st.text())
def test_host_name_is_not_interpreted_as_ssh_option(text: str):
    _, fault = attempted(check_words_of_ssh, [text], "python")
    if fault:
        assert re.search(ONE_LINE, fault)
    else:
        assert re.fullmatch(r"[\w.:@%+/\[\]-]+", text, re.ASCII)
        assert not re.search("(^|@|//)-", text)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["ssh", "--hosts=-oProxyCommand=touch PWNED"], "--hosts"),
        (["ssh", "--hosts", "a,-oProxyCommand=x"], "--hosts"),
        (["ssh", "--hosts", "a,,b"], "--hosts"),
        (["ssh", "--hosts", "user@-oProxyCommand=x"], "--hosts"),
        (["ssh", "--hosts", "`id`@host"], "--hosts"),
        (["ssh", "--hosts", "a", "--python=-c"], "--python"),
        (["kubernetes", "--image", "--privileged"], "expected one argument"),
        (["kubernetes", "--image=-x"], "--image"),
        (["kubernetes", "--image", "x", "--namespace", "A"], "--namespace"),
        (["kubernetes", "--image", "x", "--run.name", "../x"], "run.name"),
        (["slurm", "--run.name", "x\ntouch PWNED\n#"], "line break"),
        (["slurm", "--partition", "x\n#SBATCH --wrap=id"], "line break"),
    ],
)
def test_unsupported_launcher_arguments_raise_one_line_error(words, named, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["launch", words[0], "tests/forge_cluster/tiny.yaml", "--dry-run", *words[1:]])
    said = str(caught.value.code) if isinstance(caught.value.code, str) else capsys.readouterr().err.splitlines()[-1]
    assert named in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "slurm --nodes 2 --gpus-per-node 8",
            "uses only 2 of the 16 GPUs that are reserved: raise services.trainer.procs",
        ),
        ("kubernetes --image x --nodes 2 --gpus-per-node 1", ""),
        ("kubernetes --image x --gpus-per-node 1", "needs 2 GPUs, and --nodes 1 --gpus-per-node 1 reserve 1"),
        ("ssh --hosts a,b", ""),
    ],
)
def test_launch_compares_reserved_gpus_with_gpus_of_config(words: str, said: str, caplog: pytest.LogCaptureFixture):
    launcher, *options = words.split()
    recipe = ["apps/grpo/qwen3_1_7b.yaml", "--dry-run", "--checkpoint.every", "5"]
    try:
        main(["launch", launcher, *recipe, *options])
        found = caplog.messages
    except SystemExit as error:
        found = [str(error.code)]
    assert [said in text for text in found] == [True] * bool(said)


@pytest.mark.processes
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_ssh_command_preserves_hostile_directory_and_python_path(text: str, tmp_path: Path, monkeypatch):
    """A stand-in of ssh hands the command to a shell, as sshd does."""
    place = tmp_path / (re.sub("/", "", text)[:80] or "x")
    place.mkdir()
    python = place / "python"
    stub(
        place,
        "python",
        f'printf \'%s\\0\' "$PWD" "$PYTHONPATH" "$@" >{shlex.quote(str(tmp_path / "log"))}; echo at:1; read -r _',
    )
    stub(tmp_path, "ssh", '[ "$1 $2" = "-- node" ] || exit 3\nexec sh -c "$3"')
    monkeypatch.setenv("PYTHONPATH", text[:200])
    with start_workers(["node"], str(place), str(python), [str(tmp_path / "ssh")]) as environment:
        assert environment["FORGE_HOSTS"] == "at:1"
    words = (tmp_path / "log").read_bytes().decode().split("\0")
    assert words == [str(place), text[:200], "-m", "forge", "worker", "--listen", ":0", "--stdin", ""]
    assert not any(tmp_path.rglob("PWNED"))
