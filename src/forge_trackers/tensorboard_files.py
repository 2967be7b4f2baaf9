"""TensorBoard as a tracker."""

from __future__ import annotations

import time
from collections.abc import Sequence

from forge.observability.lines import Row

from .tracker import TrackedRun


class TensorBoard:
    """Event files in the run's folder, with scalars only; a resumed run continues them."""

    def __init__(self, section: bool, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.first = run.start + 1 if run.start else 0
        self._writer = EventFileWriter(str(run.folder / "tensorboard"))
        # TensorBoard drops the values of earlier files from this step on.
        purge = Event(wall_time=time.time(), step=self.first, session_log=SessionLog(status=SessionLog.START))
        self._writer.add_event(purge)

    def log(self, step: int, row: dict[str, float], rollouts: Sequence[Row]) -> None:
        """Write the metrics of a step as scalars."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self, finished: bool) -> None:
        """Flush and close the file."""
        self._writer.close()
