"""Private names of Monarch are in one file, and a version of Monarch that lacks one is an error of one line."""

import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

from forge.runtime import monarch_names

ROOT = Path(__file__).parents[3]


def test_private_monarch_names_are_used_in_one_file_only():
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "apps").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    assert len(sources) > 300
    private = ("monarch._src", "monarch._rust_bindings")
    naming = {file.name for file in sources if any(name in file.read_text() for name in private)}
    assert naming == {"monarch_names.py"}


def test_private_monarch_names_list_has_module_and_purpose():
    """The list to go through when Monarch's version changes."""
    assert {name: place.module.rpartition(".")[2] for name, place in monarch_names.NAMES.items()} == {
        "reload_config_from_env": "config",
        "SupervisionError": "supervision",
        "EndpointProperty": "endpoint",
        "BootstrapCommand": "host_mesh",
        "config": "actor",
        "invoke_main": "bootstrap_main",
    }
    for name, place in monarch_names.NAMES.items():
        assert getattr(monarch_names, name) is getattr(import_module(place.module), name)
        assert len(place.purpose.split()) > 3
    for module in (monarch_names.MAIN, monarch_names.LIBRARY):
        import_module(module)
    with pytest.raises(AttributeError, match="no attribute 'Actor'"):
        monarch_names.Actor  # noqa: B018


REMOVALS = {
    "import monarch._src.actor.host_mesh as m; del m.BootstrapCommand": (
        "monarch._src.actor.host_mesh.BootstrapCommand (start processes by forge's launcher, with the allocator's "
        "settings)"
    ),
    "import sys; import monarch.actor; sys.modules['monarch._src.actor.bootstrap_main'] = None": (
        "monarch._src.actor.bootstrap_main.invoke_main (run the main program of a process that was started ahead of "
        "Monarch)"
    ),
    "import monarch._src.actor.concurrent as m; m._WRAPPER_ATTR = '_renamed'": (
        "monarch.actor.concurrent_endpoint: _monarch_concurrent_endpoint_wrapper (accept it in a ForgeActor)"
    ),
}


@pytest.mark.processes
@pytest.mark.parametrize("removal", REMOVALS)
def test_missing_private_monarch_name_raises_one_line_error(removal: str):
    script = f"{removal}\ntry:\n    import forge.runtime.controller\nexcept ImportError as error:\n    print(error)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == [
        f"torchmonarch {version('torchmonarch')} lacks what forge uses of 0.7: {REMOVALS[removal]}. Install the pinned "
        "version: pip install 'torchmonarch==0.7.*'"
    ], done.stderr
