"""Rows in every form that data can have, and nothing from the network."""

import json

import pytest

from tests.data.rows import ROWS


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module")
def places(offline, tmp_path_factory):
    """The same rows in every form: name -> path."""
    from datasets import Dataset, DatasetDict

    root = tmp_path_factory.mktemp("rows")
    (root / "rows.json").write_text(json.dumps(ROWS))
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    rows = Dataset.from_list(ROWS)
    rows.to_parquet(root / "rows.parquet")
    rows.save_to_disk(root / "saved")
    DatasetDict({"train": rows, "test": rows.select(range(5))}).save_to_disk(root / "splits")
    (root / "folder").mkdir()
    rows.select(range(12)).to_parquet(root / "folder" / "train-0.parquet")
    rows.select(range(12, 23)).to_parquet(root / "folder" / "train-1.parquet")
    rows.select(range(5)).to_parquet(root / "folder" / "test-0.parquet")
    return {name: str(root / name) for name in ("rows.json", "rows.jsonl", "rows.parquet", "saved", "splits", "folder")}


@pytest.fixture
def jsonl(tmp_path):
    def write(*rows):
        path = tmp_path / "data.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return str(path)

    return write
