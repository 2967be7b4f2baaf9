"""The schedule of a run: what is written is read again, and what no run can have written is named."""

import json
from pathlib import Path

import pytest

from forge.config import ConfigError
from forge.observability.schedule import (
    SCHEDULE,
    GroupEntry,
    SampleEntry,
    StepEntry,
    header_line,
    published_line,
    seal_line,
)
from forge.types import Episode, Group
from forge_inspect.replay import find_difference, read_schedule


def episode(versions: list[int], reward: float | None = 0.1) -> Episode:
    """An episode of one turn, whose tokens these versions drew."""
    count = len(versions)
    return Episode(
        prompt_ids=[1, 2], response_ids=[5] * count, logprobs=[-0.3] * count, versions=versions, reward=reward
    )


def entries() -> list[StepEntry]:
    """Two steps; a sample of prompt 3 was unscored, and prompt 0 had no signal."""
    kept = Group([episode([0, 0, 1]), episode([1])], 3, samples=(0, 2))
    first = StepEntry(
        1, (GroupEntry.from_group(Group([episode([0]), episode([0, 0], 1.0)], 1)),), (), {"train/loss": 0.1 + 0.2}
    )
    lost = GroupEntry.from_group(Group([episode([1], None)], 3, samples=(1,)), "unscored")
    flat = GroupEntry.from_group(Group([episode([0])], 0), "no_signal")
    return [first, StepEntry(2, (GroupEntry.from_group(kept),), (lost, flat), {"train/loss": -1e-300})]


def written(folder: Path, lines: list[str]) -> Path:
    """A folder with these lines as its schedule."""
    (folder / SCHEDULE).write_text("".join(f"{line}\n" for line in lines))
    return folder


@pytest.fixture
def lines() -> list[str]:
    first, second = entries()
    return [header_line("a:B", ()), published_line(0, "aa"), first.line(), published_line(1, "bb"), second.line()]


def test_recorded_schedule_file_round_trips(tmp_path: Path, lines: list[str]) -> None:
    schedule = read_schedule(written(tmp_path, lines))
    assert [*schedule.steps.values()] == entries()
    assert (schedule.published, schedule.recipe) == ({0: "aa", 1: "bb"}, "a:B")
    # The samples of a group that trained and those of it that were dropped.
    assert [*schedule.groups[3].samples] == [0, 2, 1]
    assert schedule.groups[3].samples[0].spans == ((0, 2), (1, 1))
    assert all(find_difference(entry, entry) is None for entry in schedule.steps.values())


def test_sample_digest_covers_tokens_and_logprobs_of_branches() -> None:
    plain = episode([0, 0])
    other_token = episode([0, 0])
    other_token.tokens[-1] = 6
    other_number = episode([0, 0])
    other_number.logprobs = [0.0, 0.0, -0.3, -0.30000000000000004]
    branched = episode([0, 0])
    branched.branches = (episode([0]),)
    digests = {SampleEntry.from_episode(each).digest for each in (plain, other_token, other_number, branched)}
    assert len(digests) == 4
    assert SampleEntry.from_episode(branched).spans == ((0, 3),)
    assert SampleEntry.from_episode(episode([0, 0])) == SampleEntry.from_episode(plain)


def test_edited_schedule_line_error_names_line_number(tmp_path: Path, lines: list[str]) -> None:
    for number, name, value, message in (
        (4, "step", 3, "line 5 .*checksum differs"),
        (0, "format", 9, "checksum differs"),
    ):
        line = json.loads(lines[number]) | {name: value}
        with pytest.raises(ConfigError, match=message):
            read_schedule(written(tmp_path, [*lines[:number], json.dumps(line), *lines[number + 1 :]]))
    # Of another version of forge the checksum fits.
    del line["checksum"]
    with pytest.raises(ConfigError, match="another version"):
        read_schedule(written(tmp_path, [seal_line(line), *lines[1:]]))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 1}', '"x"'])
def test_damaged_schedule_line_error_names_line_number(tmp_path: Path, lines: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=r"line 3.* is damaged"):
        read_schedule(written(tmp_path, [*lines[:2], text, *lines[3:]]))


def test_first_difference_between_schedules_is_described() -> None:
    first, second = entries()
    reward = StepEntry(1, (GroupEntry.from_group(Group([episode([0]), episode([0, 0], 0.5)], 1)),), (), first.numbers)
    assert find_difference(first, reward) == "sample 1 of prompt 1 had the reward 1.0, and now 0.5 for the same tokens"
    tokens = StepEntry(
        1, (GroupEntry.from_group(Group([episode([0, 0]), episode([0, 0], 1.0)], 1)),), (), first.numbers
    )
    assert "sample 0 of prompt 1 has other tokens or log-probabilities (versions 0x1, now 0x2)" in str(
        find_difference(first, tokens)
    )
    loss = StepEntry(2, second.groups, (), {"train/loss": 0.0})
    assert find_difference(second, loss) == "train/loss was -1e-300, and is 0.0 for the same rollouts"
    assert "trained on the prompts 1, and now on 3" in str(find_difference(first, second))
