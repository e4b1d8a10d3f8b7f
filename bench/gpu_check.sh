#!/bin/sh
# Everything that needs a card, in one call of under ten minutes: builds the extension, runs tests/gpu, measures kernels
# and whole models. Needs Python 3.11 or newer with torch, nanobind and scikit-build-core; no network, if the wheels of
# `make gpu-wheels` came along. What it finds goes to $OUT (default build/gpu_check): card.txt, tests.txt, kernels.txt,
# models.txt; the last line of the latter two is one JSON object. Each part has its own time limit, and a part that fails
# does not stop the next.
#
#   PYTHON=python3 OUT=build/gpu_check sh bench/gpu_check.sh
set -u
PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/gpu_check}
MODELS=${MODELS:-/tmp/penstock-gpu-models}
mkdir -p "$OUT" "$MODELS"
failed=0

part() { # name, seconds, command…: output goes to a file and, its end, here
    name=$1 limit_s=$2
    shift 2
    begun=$(date +%s)
    timeout "$limit_s" "$@" >"$OUT/$name.txt" 2>&1
    rc=$?
    [ $rc -eq 0 ] || failed=1
    echo "== $name: exit $rc after $(($(date +%s) - begun)) s"
    tail -n "${TAIL:-12}" "$OUT/$name.txt" | cut -c -600
}

{ date; nvidia-smi; "$PYTHON" -c 'import torch, triton; print(torch.__version__, triton.__version__)'; uname -r; nproc; free -g; } >"$OUT/card.txt" 2>&1
grep -m1 -E "MiB \|" "$OUT/card.txt"
if [ -d build/gpu-wheels ]; then
    part wheels 60 "$PYTHON" -m pip install -q --no-index --find-links build/gpu-wheels \
        numpy threadpoolctl tokenizers jinja2 safetensors typer rich pytest hypothesis ml_dtypes
fi
part build 150 "$PYTHON" -m pip install -q --no-build-isolation --no-deps -e .
part tests 200 "$PYTHON" -m pytest -q -x -p no:cacheprovider tests/gpu
part kernels 100 "$PYTHON" -m bench.gpu_kernels --quick
part models 230 "$PYTHON" -m bench.gpu --folder "$MODELS"
exit $failed
