"""Which connections the ranks of a trainer accept, on machines that differ."""

import os
import socket
from pathlib import Path

import pytest

from forge.runtime.cluster import peers


def accepted() -> bool:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        handle = peers._accept(listener.fileno(), 0, 0)
        if handle >= 0:
            assert handle not in (0, 1, 2, listener.fileno())
            os.close(handle)
        return handle >= 0


def test_without_IPv6_ranks_are_accepted(monkeypatch: pytest.MonkeyPatch):
    assert accepted()
    monkeypatch.setattr(peers, "_TABLES", (peers._TABLES[0], Path("/proc/net/none")))
    assert accepted()


def test_a_table_that_cannot_be_read_lets_no_one_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(peers, "_TABLES", (tmp_path,))
    assert not accepted()


def test_where_the_kernels_table_is_hidden_ranks_meet_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(peers, "_TABLES", (tmp_path / "tcp",))
    monkeypatch.setattr(peers, "replace", lambda *_: pytest.fail("every connection would be closed"))
    peers.accept_own_user_only.__wrapped__()
    assert "other local users can connect" in caplog.text
