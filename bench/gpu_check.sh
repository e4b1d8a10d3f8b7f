#!/bin/sh
# Everything that needs a card, in one call of under ten minutes: builds the extension, runs tests/gpu, measures kernels
# and whole models. Needs Python 3.11 or newer with torch, triton, nanobind and scikit-build-core; no network, where the
# other packages are there or the wheels of `make gpu-wheels` came along. What it finds goes to $OUT (default
# build/gpu_check), a file a part; the last line of kernels.txt and models.txt is one JSON object. Each part has its own
# time limit, and one that fails does not stop the next.
#
#   PYTHON=python3 OUT=build/gpu_check sh bench/gpu_check.sh
set -u
PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/gpu_check}
MODELS=${MODELS:-/tmp/penstock-gpu-models}
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/penstock-triton}" PYTHONUNBUFFERED=1
mkdir -p "$OUT" "$MODELS"
failed=0

part() { # name, seconds, command...: output goes to a file and, its end, here
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
if ! "$PYTHON" -c 'import numpy, highspy, threadpoolctl, tokenizers, jinja2, safetensors, typer, rich, pytest, hypothesis, ml_dtypes' 2>/dev/null; then
    part wheels 60 "$PYTHON" -m pip install -q --no-index --find-links build/gpu-wheels \
        numpy highspy threadpoolctl tokenizers jinja2 safetensors typer rich pytest hypothesis ml_dtypes
fi
workers=$("$PYTHON" -c 'import xdist; print("-n 5")' 2>/dev/null)
timeout 150 "$PYTHON" -m pip install -q --no-build-isolation --no-deps -e . >"$OUT/build.txt" 2>&1 &
build=$!
# shellcheck disable=SC2086 (the workers are two words, or none)
part kernel_tests 100 "$PYTHON" -m pytest -q -p no:cacheprovider $workers tests/gpu/test_kernels.py tests/gpu/test_experts.py
wait $build || { failed=1; tail -n 5 "$OUT/build.txt"; }
warm=""
for format in int4 int8 float16 bfloat16 float32; do
    timeout 90 "$PYTHON" -m bench.gpu_warm $format >"$OUT/warm-$format.txt" 2>&1 &
    warm="$warm $!"
done
# shellcheck disable=SC2086
wait $warm
# shellcheck disable=SC2086
part device_tests 70 "$PYTHON" -m pytest -q -p no:cacheprovider $workers tests/gpu/test_device.py
part models 220 "$PYTHON" -m bench.gpu --folder "$MODELS"
part kernels 50 "$PYTHON" -m bench.gpu_kernels --quick
exit $failed
