#!/usr/bin/env bash
# Builds the sdist and from it the wheel, installs the wheel in an empty environment, and uses it from outside the
# checkout: command line, recipes with their YAML, the page, licences.
#
#   scripts/check_package.sh [FOLDER]      keeps what it builds in FOLDER (default: a temporary one, removed)
set -euo pipefail
cd "$(dirname "$0")/.."
python="$(readlink -f "$(dirname "$(command -v "${PYTHON:-python3}")")")/$(basename "${PYTHON:-python3}")"
folder="${1:-}"
if [ -z "$folder" ]; then
    folder="$(mktemp -d)"
    trap 'rm -rf "$folder"' EXIT
fi
mkdir -p "$folder" && folder="$(readlink -f "$folder")"
fail() { echo "check_package.sh: $1" >&2; exit 1; }

"$python" -c 'from build import __main__' 2>/dev/null || fail "$python has no package build: pip install build"

# From a copy of what git has: a build leaves folders in its tree, and files that were never committed must not help.
mkdir -p "$folder/tree"
git archive HEAD | tar -x -C "$folder/tree"
"$python" -m build --outdir "$folder/dist" "$folder/tree" >"$folder/build.log" 2>&1 || { tail -20 "$folder/build.log"; fail "the build failed"; }
wheel="$(echo "$folder"/dist/*.whl)"
"$python" -m zipfile -l "$wheel" >"$folder/files"
for file in apps/grpo/tiny.yaml apps/quickstart.py forge_inspect/watch/page/index.html forge/recipes/rl.py \
    forge_weaver/__init__.py forge_sandbox/__init__.py forge_envs/mcp.py \
    dist-info/licenses/LICENSE page/uPlot.LICENSE dist-info/entry_points.txt; do
    grep -q "$file" "$folder/files" || fail "the wheel lacks $file"
done
if grep -qE '^(tests|benchmarks|docs|scripts|tutorials)/' "$folder/files"; then fail "the wheel has files that are not of the library"; fi

"$python" -m venv --clear "$folder/env"
pip=("$folder/env/bin/python" -m pip --disable-pip-version-check -q)
"${pip[@]}" install "${TORCH:-torch==2.13.0}"
"${pip[@]}" install "$wheel"

mkdir -p "$folder/elsewhere" && cd "$folder/elsewhere"
forge="$folder/env/bin/forge"
version="$("$folder/env/bin/python" -c 'import importlib.metadata; print(importlib.metadata.version("torchforge-rl"))')"
[ "$("$forge" --version)" = "forge $version" ] || fail "forge --version does not say $version"
"$folder/env/bin/python" -c 'import forge, sys; sys.exit("elsewhere" in forge.__file__ or "site-packages" not in forge.__file__)' \
    || fail "forge was not imported from the environment"
"$forge" sft apps/sft/tiny.yaml --training.steps 2 --eval.problems 8
"$forge" train apps/grpo/tiny.yaml --training.steps 2 --training.warmup_steps 0 --training.batch_size 8 --eval.problems 8
[ "$(wc -l <runs/quickstart/metrics.jsonl)" = 3 ] || fail "the run has not logged steps 0, 1 and 2"
"$forge" report runs/quickstart
grep -q uPlot runs/quickstart/report.html || fail "the report lacks the page's library"
echo "OK: $(basename "$wheel"), $(wc -l <"$folder/files") files"
