"""The page as its users see it, in a browser, over folders that real runs left or are writing."""

import itertools
import json
import os
import signal
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.watch import write_run
from forge.observability.rollouts import ROLLOUTS, read_batches
from forge_inspect.watch.report import write_report
from tests.forge_inspect.watch.conftest import Page, watching
from tests.forge_inspect.watch.test_server import HOSTILE, hostile_run
from tests.recipes.test_recipes import command, finish, start
from tests.trees import descendants

EPISODES = 384


@pytest.fixture(scope="module")
def written(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """Three runs of random rollouts, two of which differ in their seed."""
    root = tmp_path_factory.mktemp("written") / "runs"
    for number, name in enumerate(("one", "two", "three")):
        settings = {"seed": number % 2, "training": {"steps": 40, "learning_rate": 0.1 * (number // 2)}}
        write_run(root, name, EPISODES, 24, rows=30, settings=settings)
    with watching(root) as url:
        yield root, url


def shown(page: Page) -> int:
    return int(page.text("#count").split(" of ")[0])


def lengths(page: Page) -> list[int]:
    return [int(text) for text in page.texts("#found tbody td:nth-child(6)")]


@pytest.mark.processes
def test_watch_page_plots_curves_of_several_runs(page: Page, written: tuple[Path, str]):
    root, url = written
    page.open(f"{url}/#run=one&view=overview")
    page.wait(lambda: len(page.all("section.card .uplot")) >= 2)
    assert len(page.all(".run")) == 3
    assert "reward" in page.text("main")
    assert "finished" in page.text("#now")
    for axis in ("seconds", "tokens", "cpu_seconds"):
        page.choose("#axis", axis)
    drawn = page.browser.execute_script("return document.querySelector('.card .uplot canvas').width")
    assert drawn > 200
    page.choose("#axis", "step")
    page.choose("#metric", "cpu_seconds")
    page.wait(lambda: page.text("section.card h3").startswith("cpu_seconds"))
    plotted = (
        "const p = [...document.querySelectorAll('.card')].at(1).lastChild.plot; return [p.data.length - 1, p.data[1]]"
    )
    before = page.browser.execute_script(plotted)
    page.browser.execute_script(
        "const s = document.querySelector('#smooth'); s.value = 0.9; s.dispatchEvent(new Event('input'))"
    )
    smooth = page.browser.execute_script(plotted)
    rows = [json.loads(line) for line in (root / "one/metrics.jsonl").read_text().splitlines()]
    assert before[1] == pytest.approx([row["reward"] for row in rows], rel=1e-6)
    assert max(smooth[1]) - min(smooth[1]) < max(before[1]) - min(before[1])
    for number in (1, 2):
        page.click(".run input:not(:checked)")
        page.wait(lambda number=number: len(page.all(".run input:checked")) == number + 1)
    page.wait(lambda: "Settings that differ" in page.text() and "training.learning_rate" in page.text())
    page.wait(lambda: page.browser.execute_script(plotted)[0] == 3)
    page.choose("#seeds", "mean")
    page.wait(lambda: "mean of 2 seeds" in page.text())


@pytest.mark.processes
def test_watch_page_filters_sorts_and_opens_rollouts(page: Page, written: tuple[Path, str]):
    root, url = written
    rows = [row for _, batch in read_batches(root / "one" / ROLLOUTS) for row in batch.to_pylist()]
    page.open(f"{url}/#run=one&view=rollouts")
    page.wait(lambda: len(page.all("#found tbody tr.link")) == 50)
    assert shown(page) == EPISODES
    for width in (1280, 400):  # samples of a group share their prompt: the response is what differs
        page.look(width)
        prompt, response = page.texts("#found tr:first-child td.text div")
        written_by_policy = ["".join(itertools.compress(row["texts"], row["mask"])).split() for row in rows]
        assert response.split() in [words[: len(response.split())] for words in written_by_policy]
        assert prompt.split() in [row["prompt"].split()[: len(prompt.split())] for row in rows]
        ends = "return [...document.querySelectorAll('#found td.text')].map((e) => e.getBoundingClientRect().right)"
        assert max(page.browser.execute_script(ends)) <= width
    page.look(1280)
    page.type("#text", "question 17:")
    page.wait(lambda: shown(page) == sum("Question 17:" in row["prompt"] for row in rows))
    page.type("#text", " ")
    page.choose("#reason", "zero_advantage")
    page.wait(lambda: shown(page) == sum(row["dropped"] == "zero_advantage" for row in rows))
    page.choose("#reason", "")
    page.type("#step_max", "1")
    page.wait(lambda: shown(page) == sum(row["step"] == 1 for row in rows))
    page.click(".bars button:not(:disabled)", -1)
    page.wait(lambda: shown(page) == sum(row["step"] == 1 and row["reward"] > 0.5 for row in rows))
    page.click(".controls button")
    page.wait(lambda: shown(page) == EPISODES)
    page.click("#found th", 5)
    longest = sorted((row["length"] for row in rows), reverse=True)
    page.wait(lambda: lengths(page) == longest[:50])
    page.click(".controls button", -1)
    page.wait(lambda: lengths(page) == longest[50:100])
    page.click("#found tbody tr.link", 3)
    page.wait(lambda: page.all(".strip span"))
    number = int(urllib.parse.parse_qs(page.browser.current_url.split("#")[1])["row"][0])
    assert len(page.all(".strip span")) == len(rows[number]["tokens"])
    assert len(page.all(".group .card")) == 8
    token = next(i for i, own in enumerate(rows[number]["mask"]) if own)
    page.browser.execute_script(
        f"document.querySelectorAll('.strip span')[{token}].dispatchEvent(new PointerEvent('pointerenter'))"
    )
    detail = page.text(".pair .card")
    for text in (f"token {token}", "log-prob., engine", "log-prob., trainer", "entropy", "version", "ratio"):
        assert text in detail
    why = page.text(".why")
    assert (
        "Not trained: all 8 samples" in why
        if rows[number]["dropped"]
        else f"Trained in step {rows[number]['step']}" in why
    )
    for field in ("entropy", "difference", "ratio", "loss"):
        if rows[number]["dropped"] is None:
            page.choose("#field", field)
            assert page.browser.execute_script(
                "return [...document.querySelectorAll('.strip span')].some((s) => s.style.background)"
            )


@pytest.mark.processes
def test_watch_page_shows_held_out_answers(page: Page, tmp_path: Path):
    root = tmp_path / "runs"
    write_run(root, "one", 24, 24, rows=4)
    rows = [
        {"step": step, "problem": number, "prompt": f"{number} + 1", "target": str(number + 1),
         "reward": 0.5, "tokens": 2, "response": f"<b>answer {number}</b>", "correct": step > number, "finish": "stop"}
        for step in (0, 30) for number in range(60)
    ]  # fmt: skip
    (root / "one/held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with page.watching(root) as url:
        page.open(f"{url}/#run=one&view=held_out")
        page.wait(lambda: len(page.all("#held-out tbody tr.link")) == 50)
        assert page.text("#answers") == "60 of 60"
        assert page.texts("#held-out tbody tr:first-child td")[:3] == ["0", "yes", "no"]
        assert "<b>answer 0</b>" in page.text("#held-out")
        page.choose("#verdict", "wrong")
        page.wait(lambda: page.text("#answers") == "30 of 60")
        page.choose("#step", "0")
        page.wait(lambda: page.text("#answers") == "60 of 60")
        page.click("#held-out tbody tr.link")
        page.wait(lambda: page.all("#held-out pre"))
        assert page.texts("#held-out pre") == ["0 + 1", "1", "<b>answer 0</b>"]
        for width in (1280, 400):
            page.look(width)
            assert page.overlaps() == []
        page.look(1280)


@pytest.mark.processes
def test_watch_page_shows_hostile_content_as_text(page: Page, tmp_path: Path):
    hostile_run(tmp_path, "a<b>")
    with page.watching(tmp_path) as url:
        for view in ("overview", "time", "rollouts", "rollouts&row=0", "rollouts&row=1", "rollouts&row=2"):
            page.open(f"{url}/#run={urllib.parse.quote('a<b>')}&view={view}")
            page.wait(lambda: "a<b>" in page.browser.find_element("css selector", "#now").get_attribute("textContent"))
            assert page.browser.title != "owned"
            assert page.browser.execute_script("return document.querySelectorAll('main script, main img').length") == 0
            assert page.overlaps() == []
        page.open(f"{url}/#run={urllib.parse.quote('a<b>')}&view=rollouts&row=0")
        page.wait(lambda: "<script>document.title='owned'</script>␛[31m\\u202e" in page.text())
    write_report(tmp_path / "a<b>")
    page.open((tmp_path / "a<b>/report.html").as_uri())
    page.wait(lambda: "a<b>" in page.text("aside"))
    assert page.browser.title == "a<b> – forge"
    assert HOSTILE not in page.browser.title


@pytest.fixture(scope="module")
def trained(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two mini-batches a step, all of it recorded."""
    folder = tmp_path_factory.mktemp("trained")
    whole = ["--metrics.rollouts", "all", "--training.mini_batches", "2", "--async.max_policy_age", "1"]
    code, output = finish(*command(folder, *whole, "--generator.num_replicas", "1", "--training.steps", "4"))
    assert code == 0, output
    assert "view the run: forge watch" in output
    return folder / "runs"


@pytest.mark.full
@pytest.mark.processes
def test_watch_page_updates_while_run_continues_and_after_kill(page: Page, tmp_path: Path):
    options = [
        "--training.steps",
        "100000",
        "--generator.num_replicas",
        "1",
        "--eval.every",
        "0",
        "--checkpoint.every",
        "0",
    ]
    run = start(*command(tmp_path, *options, "--metrics.rollouts", "all"), group=True)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "runs/test/metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        with page.watching(tmp_path / "runs") as url:
            page.open(f"{url}/#run=test&view=overview")
            points = "return document.querySelector('.card .uplot')?.parentNode.plot.data[0].length"
            first = page.wait(lambda: page.browser.execute_script(points), 120)
            assert "running" in page.text("#now")
            page.wait(lambda: page.browser.execute_script(points) > first + 3, 120)
            page.open(f"{url}/#run=test&view=rollouts")
            before = page.wait(lambda: page.all("#count") and page.text("#count") and shown(page))
            page.wait(lambda: shown(page) > before)
            page.open(f"{url}/#run=test&view=rollouts")
            processes = descendants(run.pid)
            os.kill(run.pid, signal.SIGKILL)
            run.wait(60)
            assert len(processes) >= 2
            page.wait(lambda: "stopped" in page.text("#now"), 120)
            for view, there in (
                ("overview", ".uplot"),
                ("time", "#lanes"),
                ("rollouts", "#found tr.link"),
                ("rollouts&row=3", ".strip span"),
            ):
                page.open(f"{url}/#run=test&view={view}")
                page.wait(lambda there=there: page.all(there))
                assert page.all(".error") == []
            page.open(f"{url}/#run=test&view=time")
            page.wait(lambda: "trainer0" in page.text())
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
        run.communicate(timeout=60)
