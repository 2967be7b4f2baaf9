"""Execute the tutorials as notebooks and write them with their outputs.

    python scripts/run_tutorials.py                      # all that download nothing
    python scripts/run_tutorials.py 07_a_real_model      # by name

Each runs in a kernel of its own, in the output folder. The exit code is 1 if a cell of one raised.
"""

import argparse
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

ROOT = Path(__file__).resolve().parents[1]
# Needs the model that `make real` downloads (98 MB), and takes minutes of all cores.
DOWNLOADS = {"07_a_real_model"}
CELL_TIMEOUT = 1800  # seconds, on a machine as busy as it may be


def execute(source: Path, folder: Path) -> str | None:
    """Write the executed notebook, also of a failed one. The error, if a cell raised."""
    notebook = jupytext.read(source)
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    error = None
    try:
        NotebookClient(notebook, timeout=CELL_TIMEOUT, resources={"metadata": {"path": str(folder)}}).execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as failed:
        error = str(failed)
    nbformat.write(notebook, folder / f"{source.stem}.ipynb")
    return error


def main() -> None:
    known = {path.stem: path for path in sorted((ROOT / "tutorials").glob("*.py"))}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(known)}")
    parser.add_argument("--out", type=Path, default=ROOT / "build/tutorials")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in known]:
        parser.error(f"unknown tutorial {unknown[0]!r}; known here: {', '.join(known)}")
    folder = arguments.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in arguments.names or [name for name in known if name not in DOWNLOADS]:
        began = time.monotonic()
        error = execute(known[name], folder)
        print(f"{name}: {'FAILED' if error else 'ok'} after {time.monotonic() - began:.0f} s", flush=True)
        if error:
            failed.append(name)
            print(error, file=sys.stderr)
    if failed:
        raise SystemExit(f"error: {', '.join(failed)} failed")


if __name__ == "__main__":
    main()
