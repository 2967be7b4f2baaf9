#!/usr/bin/env bash
# Installs forge from this checkout for AMD GPUs, into the active environment (conda or venv), or into .venv if none is
# active. Checks Python, ROCm and GPUs first. Safe to run again. Written for ROCm; not yet run on an AMD GPU.
#
#   ./scripts/install_rocm.sh [--titan]
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "install_rocm.sh: $1" >&2; exit 1; }

extras=""
for option in "$@"; do
    case "$option" in
        --titan) extras=",titan" ;;
        --vllm) fail "vLLM has no ROCm wheel on PyPI: use the image rocm/vllm, and run pip install -e . in it" ;;
        -h | --help) sed -n '2,5s/^# \{0,1\}//p' "$0"; exit ;;
        *) fail "unknown option $option: --titan is known" ;;
    esac
done

[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || fail "ROCm needs Linux on x86_64, this is $(uname -s) on $(uname -m)"

active="${VIRTUAL_ENV:-${CONDA_PREFIX:-}}"
python="${active:+$active/bin/python}"
python="${python:-${PYTHON:-python3}}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
    || fail "$python is not Python 3.11 or newer: activate an environment that has it, or set PYTHON=/path/to/python3.12"

[ -e /dev/kfd ] || fail "there is no /dev/kfd: install the amdgpu driver, or use scripts/install.sh --cpu"
[ -r /dev/kfd ] && [ -w /dev/kfd ] || fail "no access to /dev/kfd: add this user to the groups render and video"
command -v rocminfo >/dev/null || fail "rocminfo was not found: install ROCm, or add /opt/rocm/bin to PATH"
gpus="$(rocminfo | grep -c 'Device Type: *GPU')" || fail "rocminfo lists no GPU: check the driver with rocminfo"
version="$(cut -d- -f1 "${ROCM_PATH:-/opt/rocm}/.info/version" 2>/dev/null | cut -d. -f1,2)"
[ -n "$version" ] || fail "the ROCm version is unknown: set ROCM_PATH to the folder of ROCm"
echo "ROCm $version, $gpus GPUs"

if [ -z "$active" ]; then
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    active="$PWD/.venv" python="$PWD/.venv/bin/python"
fi
pip() { "$python" -m pip --disable-pip-version-check "$@"; }
# The index of PyTorch has one build for each of the newest ROCm versions.
index="https://download.pytorch.org/whl/rocm$version"
"$python" -c 'import torch, sys; sys.exit(torch.version.hip is None)' 2>/dev/null \
    || pip install --index-url "$index" 'torch==2.13.0' \
    || fail "no torch 2.13.0 for ROCm $version at $index: see pytorch.org for the supported versions"
pip install --quiet -e ".[data$extras]" tensorboard

"$python" - "$gpus" <<'PYTHON'
import sys
import torch, forge
found = torch.accelerator.device_count()
if torch.version.hip is None or found != int(sys.argv[1]):
    sys.exit(f"install_rocm.sh: ROCm lists {sys.argv[1]} GPUs and torch {torch.__version__} sees {found}: reinstall torch")
print(f"OK: torch {torch.__version__}, forge {forge.__version__}, {found} GPUs")
PYTHON
echo "Next: source $active/bin/activate, then python -m apps.sft.main --config apps/sft/tiny.yaml, or a configuration of yours"
