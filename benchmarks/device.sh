#!/usr/bin/env bash
# All that needs a GPU, in under six minutes: benchmarks/device.sh FOLDER
#
# The machine, then correctness (the kernels' own tests, natively), then op timings, then training; into eight files of
# FOLDER (compilers work in a temporary folder). Needs torch, Triton, pytest and pytest-xdist, no Hydra and no network;
# gelu.cu needs cuda-core, and Liger-Kernel is measured where it is installed. A step that fails or takes too long stops
# no other: the exit code is 1 then, and steps.txt says which. PYTEST_ADDOPTS, OPS_OPTIONS and TRAINING_OPTIONS are
# further words for the steps. Without a GPU all of it runs at tiny sizes, the kernels with TRITON_INTERPRET=1.
set -u
[ $# = 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1" && cd "$1" || exit 2
out=$PWD
work=$(mktemp -d 2>/dev/null) || work=$out/.work # of compilers; torch's fails in a folder with a blank in its name
mkdir -p "$work"
trap 'rm -rf "$work" "$out"/*.new' EXIT
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 TMPDIR=$work HOME=$work XDG_CACHE_HOME=$work
export TRITON_CACHE_DIR=$work/triton TORCHINDUCTOR_CACHE_DIR=$work/inductor CUDA_CACHE_PATH=$work/cuda MPLCONFIGDIR=$work
python=${PYTHON:-python3}
budget=${BUDGET_S:-350}
failed=0
: >steps.txt

# step NAME SECONDS COMMAND...: its output to NAME.log and the screen, its exit code and time to steps.txt.
step() {
  local name=$1 limit=$2 left=$((budget - SECONDS)) began=$SECONDS code
  shift 2
  [ "$left" -lt "$limit" ] && limit=$left
  if [ "$limit" -lt 5 ]; then
    code="skipped, out of time"
  else
    timeout --kill-after=5 "$limit" "$@" </dev/null 2>&1 | tee "$name.log"
    code=${PIPESTATUS[0]}
  fi
  [ "$code" = 0 ] || failed=1
  echo "$name: exit code $code after $((SECONDS - began)) s (of at most $limit)" | tee -a steps.txt
}

step environment 30 bash -c 'nvidia-smi; "$0" -m torch.utils.collect_env' "$python"
step kernels 80 "$python" -m pytest -q -c /dev/null --rootdir "$root/tests/kernels" --confcutdir "$root/tests/kernels" \
  -p no:cacheprovider -p xdist.plugin -n auto --maxprocesses 8 --ignore "$root/tests/kernels/test_training.py" "$root/tests/kernels"
step ops 125 "$python" -m andrea_exp.bench_ops --out "$out" --budget-s 105 ${OPS_OPTIONS:-}
step training "$budget" "$python" "$root/benchmarks/training.py" --out "$out" --budget-s $((budget - SECONDS - 10)) \
  ${TRAINING_OPTIONS:-}
exit $failed
