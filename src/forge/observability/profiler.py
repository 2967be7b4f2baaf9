"""`torch.profiler` in the processes of a run, for selected steps."""

import os
from pathlib import Path
from typing import Any

_running: tuple[Any, Path] | None = None


def profile_next(path: str | None, process: str) -> None:
    """End the profile of this process, if one runs, and write it; start another if a path is given.

    `<path>/<process>.json` is a trace for ui.perfetto.dev of the operators of all threads, with shapes and memory. With
    a GPU `<process>.pickle` is a snapshot of its memory for pytorch.org/memory_viz; that part is untested.

    Args:
        path: a folder, which is created.
    """
    global _running
    if _running is None and path is None:
        return
    import torch
    from torch.profiler import ProfilerActivity, profile

    gpu = torch.cuda.is_available()
    # Written aside and renamed, so that a profile that exists is complete.
    if _running is not None:
        profiler, folder = _running
        _running = None
        profiler.stop()
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f"{process}.unfinished"
        profiler.export_chrome_trace(str(aside))
        os.replace(aside, folder / f"{process}.json")
        if gpu:
            torch.cuda.memory._dump_snapshot(str(folder / f"{process}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)

    if path is not None:
        if gpu:
            torch.cuda.memory._record_memory_history()
        # Endpoints run in other threads than the event loop, which calls this function.
        every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
        profiler = profile(
            activities=activities, record_shapes=True, profile_memory=True, experimental_config=every_thread
        )
        profiler.start()
        _running = profiler, Path(path)
