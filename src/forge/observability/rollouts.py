"""Recorded rollouts with all data of their tokens: `rollouts.arrow` in the run's folder.

The file is an Arrow IPC stream, one record batch for each step. pandas, polars and `datasets` open it. Each batch is
appended in one write; a process that is killed during it leaves an incomplete message at the end, which `read_batches`
skips and a resumed run removes.
"""

import json
import logging
import math
import os
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..system.files import written_aside
from ..types import Batch, Episode, Group, Sample
from .lines import Row

if TYPE_CHECKING:
    import pyarrow

ROLLOUTS = "rollouts.arrow"
CHUNK = 1 << 22  # bytes that are copied at once
END = 8  # bytes of the mark at the end of an Arrow stream
IDLE = "zero_advantage"  # the reason of a sequence whose tokens all have advantage 0: the batch does not contain it
TEXT = ("prompt", "response", "target")
# Numbers of each token; unknown ones are NaN.
ENGINE = ("engine_logprobs",)
# Made with the batch that is trained, by the controller.
BATCH = ("advantages", "weights", "ref_logprobs", "values", "returns")
# Computed during the step, by the trainer.
TRAINER = ("logprobs", "ratio", "entropy", "clip_fraction", "correction_fraction", "loss")

log = logging.getLogger(__name__)


@cache
def make_schema() -> "pyarrow.Schema":
    """Return the schema of `rollouts.arrow`, where a row is one token sequence: an episode, or an earlier branch of an
    episode whose conversation was rewritten."""
    import pyarrow as pa

    numbers = {name: pa.list_(pa.float32()) for name in (*ENGINE, *BATCH, *TRAINER)}
    return pa.schema(
        {
            "step": pa.int32(),  # that trained it; of a dropped group the next step
            "group": pa.int64(),  # index of its prompt
            "sample": pa.int32(),  # number among the samples of the prompt
            "branch": pa.int32(),  # counted from the end of the episode: 0 is the last one
            **{name: pa.string() for name in TEXT},
            "reward": pa.float64(),  # of the whole episode; null: unscored
            "parts": pa.string(),  # JSON object: what each function and verifier adds to the reward
            "advantage": pa.float32(),
            "version": pa.int64(),  # of the oldest weights that sampled a token
            "origins": pa.string(),  # JSON list of [version, identity of its weights, sampler]
            "finish": pa.string(),
            "turns": pa.string(),  # JSON list of [first token, end, version, finish, reward]
            "dropped": pa.string(),  # reason why it did not train; null if it did
            "length": pa.int32(),  # tokens that the policy sampled
            "tokens": pa.list_(pa.int32()),
            "texts": pa.list_(pa.string()),
            "mask": pa.list_(pa.bool_()),
            "versions": pa.list_(pa.int64()),
            **numbers,
            "images": pa.string(),  # JSON list of the prompt's, as data URLs, in the row of its first sample
            "policy": pa.string(),  # the name by which an agent asked for it; null where a run has one policy
        }
    )


class RolloutLog:
    """Writer of the file `rollouts.arrow` of a run.

    Args:
        path: of the file, whose size is read.
        write: appends bytes to it.
        groups: number of groups of each step that are recorded.
        max_bytes: size of the file after which recording stops, with one warning.
        spell: returns the text of a token.
    """

    def __init__(
        self,
        path: Path,
        write: Callable[[bytes], None],
        groups: int | Literal["all"] = 1,
        max_bytes: float = math.inf,
        spell: Callable[[int], str] | None = None,
    ) -> None:
        self._path, self._write, self._spell = path, write, spell
        self.groups, self._max_bytes = groups, max_bytes

        self._schema = make_schema()  # Arrow's import takes most of a second, which no step should include
        self._texts: dict[int, str] = {}
        self._size = path.stat().st_size if path.exists() else 0

    def pick(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups of a step that are to be recorded, in data order; none once the file is full."""
        if self.groups == 0 or self._size >= self._max_bytes:
            return []
        recorded = groups if self.groups == "all" else groups[: self.groups]
        return sorted(recorded, key=lambda group: group.index)

    def add(
        self,
        step: int,
        groups: Sequence[Group],
        batch: Batch | None = None,
        trained: Mapping[str, np.ndarray] | None = None,
        dropped: Sequence[tuple[str, Group]] = (),
    ) -> None:
        """Append the rollouts that a step trained, and the rollouts dropped since the previous step.

        Args:
            groups: the groups that `pick` returned; with `batch`, exactly the groups whose tokens it records.
            batch: the batch that was trained, with token-level advantages.
            trained: values of the trainer for each recorded token, [recorded], by the column names in `TRAINER`.
            dropped: (reason, group) of each dropped group, of which at most the configured number is written.
        """
        import pyarrow as pa

        if self.groups != "all":
            dropped = dropped[: self.groups]

        # A row for each branch of each episode, in the order in which they are trained: branch 0 comes last.
        rows: list[Row] = []
        episodes: list[Episode] = []
        for reason, group in [*((None, group) for group in groups), *dropped]:
            for sample, last in enumerate(group.episodes):
                branches = (*last.branches, last)
                for branch, episode in enumerate(reversed(branches)):
                    row = _make_row(step, group, sample, branch, episode, last, reason)
                    rows.insert(len(rows) - branch, row)  # before the later branches of the episode
                episodes += branches

        if not rows:
            return

        # Numbers of tokens are flat arrays over all rows; row i is [ends[i]:ends[i + 1]].
        ends = np.concatenate([[0], np.cumsum([len(episode.tokens) for episode in episodes])])
        flat = {name: np.full(ends[-1], np.nan, np.float32) for name in (*ENGINE, *BATCH, *TRAINER)}
        mask = _flatten_rows([episode.mask for episode in episodes], np.bool_)
        engine = [e.logprobs or [math.nan] * len(e.tokens) for e in episodes]
        flat["engine_logprobs"] = np.where(mask, _flatten_rows(engine, np.float32), np.float32(np.nan))

        if batch is not None and batch.recorded is not None:
            recorded = np.flatnonzero((batch.recorded >= 0) & batch.mask)
            for name in BATCH:
                if (values := getattr(batch, name)) is not None:
                    flat[name][batch.recorded[recorded]] = values[recorded]

            in_batch = np.zeros(ends[-1], np.bool_)
            in_batch[batch.recorded[batch.recorded >= 0]] = True
            for row, start in zip(rows, ends[:-1], strict=True):
                if row["dropped"] is None and not in_batch[start]:
                    row["dropped"] = IDLE
            for name, numbers in (trained or {}).items():
                flat[name][: len(numbers)] = numbers  # dropped rows come after them

        tokens = _flatten_rows([episode.tokens for episode in episodes], np.int32)
        lists: dict[str, np.ndarray | pyarrow.Array] = {
            "tokens": tokens,
            "texts": self._texts_of(tokens),
            "mask": mask,
            "versions": _flatten_rows([episode.versions for episode in episodes], np.int64),
            **flat,
        }
        offsets = pa.array(ends, pa.int32())
        arrays = [
            pa.ListArray.from_arrays(offsets, pa.array(lists[field.name], field.type.value_type))
            if field.name in lists
            else pa.array([row[field.name] for row in rows], field.type)
            for field in self._schema
        ]
        sink = pa.BufferOutputStream()

        with pa.ipc.new_stream(sink, self._schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
            writer.write_batch(pa.record_batch(arrays, schema=self._schema))

        # The file has the schema only once, at its start, and no mark of its end, since more batches may follow.
        schema_bytes = len(self._schema.serialize())
        message = sink.getvalue().to_pybytes()[schema_bytes if self._size else 0 : -END]
        self._write(message)
        self._size += len(message)

        if self._size >= self._max_bytes:
            log.warning(
                "%s has %.0f MB: no more rollouts are recorded; raise metrics.rollouts_mb, or lower metrics.rollouts",
                self._path,
                self._size / 1e6,
            )

    def _texts_of(self, tokens: np.ndarray) -> "pyarrow.Array":
        """Return the text of each token, spelled once for each distinct token."""
        import pyarrow as pa

        distinct, indices = np.unique(tokens, return_inverse=True)
        for token in distinct.tolist():
            if token not in self._texts:
                self._texts[token] = "" if self._spell is None else escape_surrogates(self._spell(token))
        return pa.array([self._texts[token] for token in distinct.tolist()], pa.string()).take(pa.array(indices))


def escape_surrogates(text: str) -> str:
    r"""Return the text with lone surrogates, which UTF-8 cannot encode, as escapes.

    >>> escape_surrogates("a\ud800")
    'a\\ud800'
    """
    return text.encode("utf-8", "backslashreplace").decode()


def _make_row(
    step: int, group: Group, sample: int, branch: int, episode: Episode, last: Episode, reason: str | None
) -> Row:
    """Return the row of a token sequence, without the columns that have a value for each token.

    Args:
        sample: number of the episode in its group.
        branch: number of the sequence, counted from the end of the episode.
        episode: the sequence.
        last: the sequence that the episode ended with.
        reason: why the group was dropped; None if it trained.
    """
    info = episode.info
    images = last.images if sample == 0 and branch == 0 else ()

    # One number: the mean, if each token has its own.
    advantage = float(np.mean(episode.advantage)) if isinstance(episode.advantage, Sequence) else episode.advantage

    return {
        "step": step,
        "group": group.index,
        "sample": info.get("sample", sample),  # numbered over all policies, where a run trains several
        "branch": branch,
        "prompt": escape_surrogates(group.prompt),
        "response": escape_surrogates(episode.text),
        "target": escape_surrogates(str(group.target)),
        "reward": last.outcome,
        "parts": json.dumps(reward_parts) if (reward_parts := info.get("parts")) else "{}",
        # A dropped episode has no advantage here, even if one was computed for its group.
        "advantage": None if reason is not None else advantage,
        "version": episode.version,
        "origins": json.dumps(sorted(episode.origins)),
        "finish": str(info.get("stop") or info.get("finish") or ""),
        "turns": json.dumps(episode.turns) if episode.turns else "[]",
        "dropped": reason,
        "length": sum(episode.mask),
        "images": json.dumps([f"data:image/png;base64,{b64encode(file).decode()}" for file in images]),
        "policy": last.policy or None,
    }


def _flatten_rows(rows: Sequence[Sequence[float]], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(row, dtype=dtype) for row in rows])


def read_batches(
    path: Path, columns: Sequence[str] | None = None, after: int = 0
) -> "Iterator[tuple[int, pyarrow.RecordBatch]]":
    """Yield (offset of its end in the file, rows) of the batch of each step, as far as the file is undamaged.

    A file that does not exist has no steps.

    Args:
        columns: names of the columns to decompress; None: all.
        after: the offset after which to read, such as the end of the last batch that was read.

    Raises:
        ValueError: the file is not of this format.
    """
    import pyarrow as pa

    if not path.is_file() or path.stat().st_size <= len(make_schema().serialize()):
        return  # no step was written, or the process was killed during its first write

    with pa.OSFile(str(path)) as file:
        try:
            written = pa.ipc.read_schema(pa.ipc.read_message(file))
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"{path} is not a rollouts file: {error}") from None

        if written != make_schema():
            raise ValueError(
                f"{path} has unknown columns, because another version of forge wrote it: read it with that version"
            )

        names = make_schema().names if columns is None else columns
        options = pa.ipc.IpcReadOptions(included_fields=[written.get_field_index(name) for name in names])
        header = written.serialize().to_pybytes()
        file.seek(max(after, file.tell()))

        while True:
            try:
                message = header + pa.ipc.read_message(file).serialize().to_pybytes()
                batch = pa.ipc.open_stream(message, options=options).read_next_batch()
            except (StopIteration, EOFError, OSError, pa.ArrowException):  # the end, or damage from here on
                return
            yield file.tell(), batch


def count_rows(path: Path) -> int:
    """Return the number of rows of a file of rollouts, 0 if it does not exist. ValueError: as in `read_batches`."""
    return sum(len(batch) for _, batch in read_batches(path, ["step"]))


def cut_rollouts(path: Path, last: int) -> None:
    """Remove the steps after `last`, and all from the first damaged one on, from a file of rollouts.

    The remaining steps are copied to a new file, since truncating would end processes that have mapped the old one into
    memory, by SIGBUS.
    """
    end = 0
    try:
        for position, batch in read_batches(path, ["step"]):
            if batch["step"][0].as_py() > last:
                break
            end = position
    except ValueError as error:
        log.warning("%s; it is removed", error)

    if path.exists() and path.stat().st_size > end:
        with written_aside(path) as aside, path.open("rb") as old, aside.open("wb") as new:
            while data := old.read(min(end - new.tell(), CHUNK)):
                new.write(data)
            new.flush()
            os.fsync(new.fileno())


def texts_by_group(batch: "pyarrow.RecordBatch") -> list[Row]:
    """Return a dict for each group of a batch that trained: its prompt, its first response, the target, all rewards and
    the oldest version that sampled it."""
    groups: dict[int, Row] = {}
    for row in batch.select(["step", "group", "branch", "version", *TEXT, "reward", "dropped"]).to_pylist():
        if row["branch"] or row["dropped"] not in (None, IDLE):
            continue

        first_row = {"step": row["step"], "index": row["group"], **{name: row[name] for name in ("version", *TEXT)}}
        group = groups.setdefault(row["group"], first_row | {"rewards": []})
        group["version"] = min(group["version"], row["version"])
        group["rewards"].append(row["reward"])

    return list(groups.values())


HELD_OUT = "held_out.jsonl"


def held_out_lines(step: int, samples: Sequence[Sample], episodes: Sequence[Episode], name: str = "") -> bytes:
    """Return the lines of `held_out.jsonl`, one JSON object for each answer to a held-out problem.

    Its keys are step, set (only if the set has a name), problem (its number in the set), prompt, target, response,
    reward, correct, tokens (number that were sampled) and finish. `reward` and `correct` are null if unknown.

    Args:
        samples: the problem of each answer; answers to one problem are adjacent, with the same object.
        episodes: the answers.
        name: of the set; "" for the section `eval` itself.
    """
    # By the identity of the samples, in their order.
    problem_numbers = {identity: number for number, identity in enumerate(dict.fromkeys(map(id, samples)))}
    rows = (
        {
            "step": step,
            **({"set": name} if name else {}),
            "problem": problem_numbers[id(sample)],
            "prompt": str(sample.prompt),
            "target": sample.target,
            "response": episode.text,
            "reward": episode.outcome,
            "correct": episode.info["correct"],
            "tokens": sum(episode.mask),
            "finish": episode.turns[-1].finish if episode.turns else episode.info.get("finish", ""),
        }
        for sample, episode in zip(samples, episodes, strict=True)
    )

    return "".join(json.dumps(row) + "\n" for row in rows).encode()
