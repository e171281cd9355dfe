#!/usr/bin/env bash
# Tests and benchmarks on one GPU, at most 6 minutes: `bash tests/gpu/run.sh`. Nothing is installed, built or downloaded.
# Needs Python >= 3.10 ($PYTHON, else python3) with torch, pytest, torchmetrics and lightning-utilities.
# `--pretend` (or FABRIC_PRETEND=1) runs the same on the pretend device of tests/pretend, without a result file.
# RESULT=FILE: where the benchmarks go in place of benchmarks/results/DATE-gpu.md.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
case $python in /*) ;; */*) python=$PWD/$python ;; esac
cd "$root"
pretend=${FABRIC_PRETEND:-}
for argument in "$@"; do
    case $argument in
    --pretend) pretend=1 ;;
    *) echo "usage: bash tests/gpu/run.sh [--pretend]" >&2 && exit 2 ;;
    esac
done
TESTS_LIMIT=${TESTS_LIMIT:-200}   # seconds
BENCH_LIMIT=${BENCH_LIMIT:-120}

command -v "$python" >/dev/null || { echo "no $python: set PYTHON to a Python >= 3.10" >&2 && exit 1; }
# torch finds the pretend device on the path, in all ranks, too.
export PYTHONPATH="$root${pretend:+:$root/tests/pretend/device}${PYTHONPATH:+:$PYTHONPATH}"
unset PYTHONUNBUFFERED

"$python" - "$pretend" <<'CHECK'
import importlib.util
import sys

if sys.version_info < (3, 10):
    sys.exit(f"Python {sys.version.split()[0]} is too old: 3.10 is needed")
names = {"torch": "torch", "pytest": "pytest", "torchmetrics": "torchmetrics", "lightning_utilities": "lightning-utilities"}
missing = [name for module, name in names.items() if importlib.util.find_spec(module) is None]
for name in missing:
    print(f"missing package: {name} (pip install {name})", file=sys.stderr)
if missing:
    sys.exit(1)
import torch

if sys.argv[1]:
    import sim_build

    if sim_build.missing():
        print(f"no pretend device: {sim_build.missing()}; nothing was tested")
        sys.exit(3)
    print(f"pretend device, torch {torch.__version__}")
elif not torch.cuda.is_available():
    print(f"no GPU: nothing was tested (torch {torch.__version__}, torch.cuda.is_available() is False)")
    sys.exit(3)
else:
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, CUDA {torch.version.cuda}")
CHECK
checked=$?
[ $checked -ne 3 ] || exit 0
[ $checked -eq 0 ] || exit 1

failed=0
# Runs a phase within its limit; a phase that fails does not keep the next one from running.
phase() {
    local name=$1 limit=$2 begin=$SECONDS status
    shift 2
    echo "== $name (at most $limit s)"
    timeout -k 10 "$limit" "$@" </dev/null
    status=$?
    [ $status -eq 0 ] || failed=1
    [ $status -lt 124 ] || echo "$name: stopped after $limit s" >&2
    echo "== $name: exit status $status after $((SECONDS - begin)) s"
}

# Warnings are errors on the pretend device only: the torch of a GPU machine may be one that nobody has tried.
warnings=(-W default)
[ -z "$pretend" ] || warnings=()
phase tests "$TESTS_LIMIT" "$python" -m pytest -q -p no:xdist -p no:hypothesispytest -p no:cacheprovider \
    "${warnings[@]}" -m gpu --durations=5 tests/gpu
if [ -n "$pretend" ]; then
    phase benchmarks "$BENCH_LIMIT" "$python" benchmarks/gpu.py --quick
else
    phase benchmarks "$BENCH_LIMIT" "$python" benchmarks/gpu.py --seconds $((BENCH_LIMIT - 15)) \
        --out "${RESULT:-benchmarks/results/$(date +%F)-gpu.md}"
fi
exit $failed
