"""`torch.profiler` in the processes of a run, for selected steps."""

import os
from pathlib import Path
from typing import Any

_running: tuple[Any, Path] | None = None


def profile_next(path: str | None, process: str) -> None:
    """End and write the profile of this process that is running, if any, and start the next one if a path is given.

    The profile `<path>/<process>.json` is a trace for ui.perfetto.dev of the operators of all threads, with shapes and
    memory. With a GPU there is also `<path>/<process>.pickle`, a snapshot of its memory for pytorch.org/memory_viz;
    that part is untested.

    Args:
        path: folder of the next profile, which is created; None: profile nothing from now on.
        process: name of this process.
    """
    global _running
    if _running is None and path is None:
        return
    import torch
    from torch.profiler import ProfilerActivity, profile

    has_gpu = torch.cuda.is_available()
    # Written under another name first, so that a profile that exists is complete.
    if _running is not None:
        profiler, folder = _running
        _running = None
        profiler.stop()
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f"{process}.unfinished"
        profiler.export_chrome_trace(str(aside))
        os.replace(aside, folder / f"{process}.json")
        if has_gpu:
            torch.cuda.memory._dump_snapshot(str(folder / f"{process}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)

    if path is not None:
        if has_gpu:
            torch.cuda.memory._record_memory_history()
        # Endpoints run in other threads than the event loop, which calls this function.
        every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])]
        profiler = profile(
            activities=activities, record_shapes=True, profile_memory=True, experimental_config=every_thread
        )
        profiler.start()
        _running = profiler, Path(path)
