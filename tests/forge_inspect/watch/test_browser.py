"""The page as its users see it, in a browser, over folders that real runs left or are writing."""

from __future__ import annotations

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
from forge.observability import Run
from forge.observability.metrics import drain
from forge.observability.rollouts import ROLLOUTS, batches
from forge_inspect.watch.report import write_report
from tests.forge_inspect.watch.conftest import Page, watching
from tests.forge_inspect.watch.test_server import HOSTILE, hostile_run
from tests.recipes.test_recipes import CONFIG, command, finish, start
from tests.trees import descendants

TOLERANCE = 1e-5  # relative: the trainer adds the same float32 numbers in another order
EPISODES = 384
ANSWERS = "eval/accuracy, eval/reward"  # the row of both in the reference of metrics


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
def test_curves_of_several_runs(page: Page, written: tuple[Path, str]):
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
def test_legends_name_lines_and_their_last_values(page: Page, tmp_path: Path):
    for name in ("one", "two"):
        drain()
        run = Run(name, {"run": {"name": name}}, steps=4, root=str(tmp_path))
        run.log(0, drain(), **{"eval/accuracy": 0.25})
        for step in range(1, 5):
            run.log(step, drain(), reward=0.125 * step, accuracy=0.5, **{"train/loss": 0.75})
        run.finish()
        run.close()
    with page.watching(tmp_path) as url:
        page.open(f"{url}/#run=one&view=overview&with=two")
        page.wait(lambda: len(page.all("section.card .uplot")) >= 2)
        names = page.texts("section.card:first-child .u-legend .u-label")
        values = page.texts("section.card:first-child .u-legend .u-value")
        metrics = ("reward", "accuracy", "eval/accuracy")
        assert names == ["step", *(f"{name} {metric}" for name in ("one", "two") for metric in metrics)]
        assert values == ["4", *("0.5", "0.5", "0.25") * 2]
        help_texts = page.browser.execute_script(
            "return [...document.querySelectorAll('section.card:first-child .u-series')].map((one) => one.title)"
        )
        assert [text.split(":")[0] for text in help_texts[1:4]] == ["reward, reward/std", "accuracy", ANSWERS]
        styles = page.browser.execute_script(
            "return [...document.querySelectorAll('section.card:first-child .u-marker')].map("
            "(one) => getComputedStyle(one).borderBottomStyle)"
        )
        assert styles[1:] == ["solid", "dashed", "dotted"] * 2
        scales = page.browser.execute_script(
            "return [...document.querySelectorAll('section.card')].map(({ lastChild: { plot } }) =>"
            " [plot.scales.x.min, plot.scales.x.max, plot.axes[0].label])"
        )
        assert len(scales) >= 2
        assert all(scale == [0, 4, "step"] for scale in scales)


@pytest.mark.processes
def test_settings_that_differ_are_shown_as_text(page: Page, tmp_path: Path):
    first = {"reward": {"env": {"A": 1}}, "model": "", "rules": [1, {"b": None}]}
    write_run(tmp_path, "one", 24, 24, rows=2, settings=first)
    write_run(tmp_path, "two", 24, 24, rows=2, settings={"reward": {"env": None}, "model": None, "rules": [1]})
    with page.watching(tmp_path) as url:
        page.open(f"{url}/#run=one&view=overview&with=two")
        page.wait(lambda: "Settings that differ" in page.text())
        assert page.texts("h2 + .scroll tbody td") == [
            *("reward.env", "(a section)", "–"),
            *("rules", '[1,{"b":null}]', "[1]"),
        ]


@pytest.mark.processes
def test_each_trained_policy_has_its_curve(page: Page, tmp_path: Path):
    models = {"rival": {"trains": True}, "judge": {"trains": False}}
    drain()
    run = Run("game", {"run": {"name": "game"}, "models": models}, steps=3, root=str(tmp_path))
    for step in range(1, 4):
        values = {"reward": 0.1 * step, "rival/reward": 0.7, "judge/reward": 0.5, "rival/policy_version": step}
        run.log(step, drain(), **values)
    run.finish()
    run.close()
    with page.watching(tmp_path) as url:
        page.open(f"{url}/#run=game&view=overview")
        page.wait(lambda: "version of each policy" in page.text("main"))
        plots = (
            "return [...document.querySelectorAll('section.card')].map((card) => {"
            " const plot = card.lastChild.plot, lines = plot.series.slice(1).map((s) => s.label);"
            " return [card.firstChild.textContent, lines, plot.data.slice(1).map((y) => y[2])] })"
        )
        cards = {title: (labels, last) for title, labels, last in page.browser.execute_script(plots)}
        assert cards["reward and accuracy"] == (["reward", "rival/reward"], [pytest.approx(0.3), 0.7])
        assert cards["version of each policy"] == (["rival/policy_version"], [3])


@pytest.mark.processes
def test_rollouts_are_filtered_sorted_and_opened(page: Page, written: tuple[Path, str]):
    root, url = written
    rows = [row for _, batch in batches(root / "one" / ROLLOUTS) for row in batch.to_pylist()]
    page.open(f"{url}/#run=one&view=rollouts")
    page.wait(lambda: len(page.all("#found tbody tr.link")) == 50)
    assert shown(page) == EPISODES
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
def test_rollouts_by_advantage_with_special_tokens(page: Page, written: tuple[Path, str]):
    root, url = written
    rows = [row for _, batch in batches(root / "one" / ROLLOUTS) for row in batch.to_pylist()]
    above = [row for row in rows if row["advantage"] is not None and row["advantage"] >= 0.5]
    page.open(f"{url}/#run=one&view=rollouts")
    page.type("#advantage_min", "0.5")
    page.wait(lambda: shown(page) == len(above) > 0)
    page.type("#advantage_min", "1000")
    page.wait(lambda: page.texts("#found tbody td") == ["No rollout passes these filters."])
    page.click(".controls button")
    page.wait(lambda: page.all("#found tbody tr.link"))
    own = next("".join(t for t, mine in zip(row["texts"], row["mask"], strict=True) if mine) for row in rows)
    page.type("#step_max", "1")
    page.click("#found th", 0)
    page.wait(lambda: any(own[:60].strip() in text for text in page.texts("#found td.text")))


@pytest.mark.processes
def test_runs_fold_on_a_narrow_screen_and_tabs_answer_at_once(page: Page, written: tuple[Path, str]):
    _, url = written
    page.look(400)
    page.open(f"{url}/#run=one&view=overview")
    page.wait(lambda: page.all(".uplot") and not page.all("#loading"))
    visible = "return [...document.querySelectorAll('.run')].filter((one) => one.offsetHeight).length"
    assert page.browser.execute_script(visible) == 1
    page.click("#unfold")
    assert page.browser.execute_script(visible) == 3
    page.click(".run", 1)
    page.wait(lambda: page.browser.execute_script(visible) == 1)
    # Before the server can have answered: a handler of the same event that was added later.
    at_once = page.browser.execute_async_script(
        """
        const done = arguments[0];
        addEventListener("hashchange", () => done(document.querySelector("#tabs [aria-current]").innerText));
        [...document.querySelectorAll("#tabs a")].find((one) => one.innerText === "Time").click();
        """
    )
    assert at_once == "Time"


@pytest.mark.processes
def test_held_out_answers_of_each_evaluation(page: Page, tmp_path: Path):
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
def test_nothing_overlaps(page: Page, written: tuple[Path, str], tmp_path: Path):
    _, url = written
    for width in (1280, 800, 390):
        for dark in (False, True):
            page.look(width, dark)
            for view in ("overview", "overview&with=two%0Athree", "time", "rollouts", "rollouts&row=200", "chat"):
                page.open(f"{url}/#run=one&view={view}")
                page.wait(lambda: page.all("main .uplot, #lanes, #found tbody tr, .strip, textarea"))
                page.wait(
                    lambda: "finished" in page.browser.find_element("css selector", "#now").get_attribute("textContent")
                )
                assert page.overlaps() == [], (width, dark, view)
    light, other = [
        (page.look(1280, dark), page.browser.execute_script("return getComputedStyle(document.body).backgroundColor"))[
            1
        ]
        for dark in (False, True)
    ]
    assert light != other


@pytest.mark.processes
def test_hostile_content_is_shown_as_text(page: Page, tmp_path: Path):
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


@pytest.mark.processes
def test_the_chat_begins_with_the_settings_of_the_run(page: Page, tmp_path: Path):
    from selenium.webdriver.common.keys import Keys

    settings = {
        "grpo": {"max_tokens": 7, "temperature": 0.5},
        "dataset": {"prompt_template": "{digits}=", "max_tokens": None},
    }
    write_run(tmp_path, "one", 24, 24, rows=4, settings=settings)
    with page.watching(tmp_path) as url:
        page.open(f"{url}/#run=one&view=chat")
        page.wait(lambda: page.value("#template") == "{digits}=")
        assert page.value("#max_tokens") == "7"
        assert page.value("#temperature") == "0.5"
        page.type("#ask", f"1{Keys.SHIFT}\n{Keys.NULL}2")
        assert page.value("#ask") == "1\n2"
        assert page.all(".turn") == []


@pytest.mark.processes
def test_each_phase_has_its_colour_and_the_range_is_said(page: Page, tmp_path: Path):
    folder = tmp_path / "busy"
    folder.mkdir()
    (folder / "config.yaml").write_text("training:\n  steps: 50\n")
    (folder / "metrics.jsonl").write_text('{"step": 50, "seconds": 50, "seconds/step": 1}\n')
    start = 5_000_000
    phases = [{"ph": "X", "pid": 1, "name": f"phase{i}", "ts": start + i, "dur": 1000 - i} for i in range(20)]
    ends = [{"ph": "i", "pid": 1, "name": "step", "ts": start + 10**6 * i, "args": {"step": i}} for i in range(1, 51)]
    (folder / "trace.json").write_text("[\n" + "\n,".join(json.dumps(one) for one in (*phases, *ends)) + "\n")
    with page.watching(tmp_path) as url:
        page.open(f"{url}/#run=busy&view=time")
        page.wait(lambda: "Steps 21 to 50 of 50" in page.text("#covered"))
        assert page.texts("button[aria-pressed=true]") == ["last 30 steps"]
        page.click(".controls button")
        page.wait(lambda: "Steps 1 to 50 of 50, 0 s to 50.0 s" in page.text("#covered"))
        assert page.texts("button[aria-pressed=true]") == ["whole run"]
        colours = page.browser.execute_script(
            "return [...document.querySelectorAll('.keys i')].map((one) => one.style.background)"
        )
        assert len(set(colours)) == 21


@pytest.mark.processes
def test_the_account_of_agents_is_shown(page: Page, tmp_path: Path):
    for name, row in (("agents", {"certificate/sampled": 5, "certificate/trained": 5}), ("others", {"reward": 1.0})):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text("training:\n  steps: 2\n")
        lines = [json.dumps({"step": step, "seconds": step, **row}) for step in (1, 2)]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with page.watching(tmp_path) as url:
        page.open(f"{url}/#run=agents")
        page.wait(lambda: "10 sampled = 10 trained" in page.text())
        page.open(f"{url}/#run=others")
        page.wait(lambda: "reward" in page.text() and "sampled" not in page.text())


@pytest.fixture(scope="module")
def trained(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two mini-batches a step, all of it recorded."""
    folder = tmp_path_factory.mktemp("trained")
    whole = ["--metrics.rollouts", "all", "--training.mini_batches", "2", "--async.max_policy_age", "1"]
    code, output = finish(*command(folder, *whole, "--generator.num_replicas", "1", "--training.steps", "4"))
    assert code == 0, output
    assert "look at it: forge watch" in output
    return folder / "runs"


@pytest.mark.processes
@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("dapo", marks=pytest.mark.slow)])
def test_every_token_of_a_step_is_accounted_for(tmp_path: Path, algorithm: str, trained: Path):
    """The page's numbers of a step add up to what the trainer logged."""
    root = trained
    if algorithm != "grpo":
        whole = ["--metrics.rollouts", "all", "--training.mini_batches", "2", "--algorithm", algorithm]
        code, output = finish(*command(tmp_path, *whole, "--generator.num_replicas", "1"))
        assert code == 0, output
        root = tmp_path / "runs"
    logged = {row["step"]: row for row in map(json.loads, (root / "test/metrics.jsonl").read_text().splitlines())}
    with watching(root) as url:

        def ask(path: str, **query: Any) -> Any:
            with urllib.request.urlopen(
                f"{url}/api/{path}?{urllib.parse.urlencode({'run': 'test', **query})}"
            ) as answer:
                return json.load(answer)

        steps = [step for step in logged if step > 0]
        assert len(steps) >= 3
        for step in steps:
            numbers = [row["row"] for row in ask("rollouts", step_min=step, step_max=step)["rows"]]
            rows = [ask("rollout", row=number) for number in numbers]
            per_step = CONFIG["training"]["batch_size"] * CONFIG["grpo"]["n_samples"]
            assert len([row for row in rows if row["dropped"] in (None, "zero_advantage")]) == per_step
            rows = [row for row in rows if row["dropped"] is None]
            own = [(row, i) for row in rows for i, mask in enumerate(row["mask"]) if mask]
            total = sum(row["loss"][i] for row, i in own)
            row = logged[step]
            assert sum(len(one["tokens"]) for one in rows) == row["train/tokens"]
            assert total == pytest.approx(row["train/loss"], rel=TOLERANCE, abs=1e-6)
            for field, metric in (("entropy", "entropy"), ("clip_fraction", "clip_fraction"), ("ratio", "ratio")):
                mean = sum(one[field][i] for one, i in own) / len(own)
                assert mean == pytest.approx(row[f"train/{metric}"], rel=TOLERANCE, abs=1e-6), field


@pytest.mark.full
@pytest.mark.processes
def test_time_chat_and_report_of_a_real_run(page: Page, trained: Path):
    with page.watching(trained) as url:
        page.open(f"{url}/#run=test&view=time")
        page.wait(lambda: "Training waited" in page.text() and len(page.all("main tbody tr")) >= 3)
        for name in ("controller", "generator0", "trainer0"):
            assert name in page.text()
        colours = page.browser.execute_script(
            """
            const lanes = document.querySelector("#lanes"), found = new Set();
            const { data } = lanes.getContext("2d").getImageData(0, 0, lanes.width, lanes.height);
            for (let i = 0; i < data.length; i += 4) found.add((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]);
            return found.size;
            """
        )
        assert colours > 6
        page.open(f"{url}/#run=test&view=chat")
        page.wait(lambda: page.value("#max_tokens") == str(CONFIG["grpo"]["max_tokens"]))
        page.type("#max_tokens", "6")
        page.type("#ask", "abc>\n")
        page.wait(lambda: page.text().count("tokens, ended by") == 2, 120)
    report = (trained / "test/report.html").read_text()
    assert "http://" not in report.split('type="application/json"')[0]
    page.open((trained / "test/report.html").as_uri())
    page.wait(lambda: len(page.all("section.card .uplot")) >= 4)
    for view in ("time", "rollouts"):
        next(tab for tab in page.all("#tabs a") if tab.text.lower() == view).click()
        page.wait(lambda: page.all("#lanes, #found tbody tr.link"))
    page.type("#reward_min", "0.01")
    page.wait(lambda: "Rollouts" in page.text("#tabs") and page.all("#found tbody tr.link"))
    page.click("#found tbody tr.link")
    page.wait(lambda: page.all(".strip span"))


@pytest.mark.full
@pytest.mark.processes
def test_a_run_is_seen_while_it_runs_and_after_it_was_killed(page: Page, tmp_path: Path):
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
    run = start(*command(tmp_path, *options, "--metrics.rollouts", "all", "--serve.port", "0"), group=True)
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
            page.open(f"{url}/#run=test&view=chat")
            page.wait(lambda: page.all("main section select"))
            page.choose("main section select", "live")
            page.type("#ask", "abc>")
            page.type("#max_tokens", "6")
            page.click("#send")
            page.wait(lambda: "tokens, ended by" in page.text("main section"), 120)
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
