"""The journal: what was appended is there after any kill, in order, and damage is never passed over."""

import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from forge.runtime.store import Journal

records = st.lists(st.one_of(st.binary(max_size=40), st.tuples(st.text(max_size=5), st.integers())), max_size=8)


def written(path: Path, items: list) -> Path:
    journal = Journal(path)
    journal.rewrite([])
    for item in items:
        journal.append(item)
    return path


@given(before=records, after=records, data=st.data())
def test_truncated_journal_keeps_valid_prefix_and_accepts_appends(before: list, after: list, data: st.DataObject):
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder) / "journal", before)
        content = path.read_bytes()
        cut = data.draw(st.integers(0, len(content)))
        path.write_bytes(content[:cut])
        left = list(Journal(path).replay())
        assert left == before[: len(left)]
        assert cut < len(content) or left == before
        assert path.read_bytes() == content[:cut]
        journal = Journal(path)
        for item in after:
            journal.append(item)
        assert list(journal.replay()) == list(Journal(path).replay()) == [*left, *after]
        assert journal.size == path.stat().st_size


@given(items=records.filter(bool), data=st.data())
def test_changed_journal_byte_raises_at_any_position(items: list, data: st.DataObject):
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder) / "journal", items)
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"journal {path} is damaged: the record at byte \d+"):
            list(Journal(path).replay())
        with pytest.raises(ValueError, match="is damaged"):
            Journal(path).append("more")
        assert path.read_bytes() == content


def test_partial_write_keeps_journal_usable(tmp_path: Path):
    path = written(tmp_path / "journal", ["first"])
    journal = Journal(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            journal.append(bytes(1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    journal.append("second")
    assert list(Journal(path).replay()) == ["first", "second"]


@pytest.mark.processes
def test_killed_writer_keeps_acknowledged_journal_records(tmp_path: Path):
    path = tmp_path / "journal"
    code = (
        "import itertools, sys; from forge.runtime.store import Journal; journal = Journal(sys.argv[1])\n"
        "for n in itertools.count(): journal.append((n, bytes(n % 5000))); print(n, flush=True)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    while int(writer.stdout.readline()) < 300:
        continue
    writer.send_signal(signal.SIGKILL)
    told = int(["300", *writer.stdout.read().split()][-1])
    writer.wait()
    numbers = [n for n, _ in Journal(path).replay()]
    assert numbers == list(range(len(numbers)))
    assert told < len(numbers) <= told + 2
