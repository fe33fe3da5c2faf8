#!/bin/bash
# device_build.sh [DEST]: build the libraries for NVIDIA and AMD GPUs without a GPU, and say how long it took and how large they are.
#
# DEST (default build/toolkits) gets what the machine lacks: a CUDA toolkit of the installed nvcc and the cuBLAS wheel, and a HIP
# toolchain. ONLY=cuda or ONLY=hip builds one; JOBS=4 sets the compilers at once; CUDA_TOOLKIT and ROCM name folders to use instead.
# Then, on the machine with the GPU: python -m bench.device_suite --device cuda:0
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
dest=$(realpath -m "${1:-build/toolkits}")
jobs=${JOBS:-$(nproc)}
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=python3
record=build/bench/device_build.txt
mkdir -p build/bench
: > "$record"

note() { echo "$*" | tee -a "$record"; }

build() { # backend, arguments of build.py
  local backend=$1 started=$SECONDS
  shift
  "$python" build.py --backend "$backend" --jobs "$jobs" "$@"
  note "$backend: $((SECONDS - started)) s with $jobs jobs, $(stat -c %s "build/$backend/bin/libggml-$backend.so") bytes libggml-$backend.so"
}

case ${ONLY:-both} in both | cuda | hip) ;; *) echo "ONLY: expected cuda or hip, found $ONLY" >&2; exit 2 ;; esac

if [ "${ONLY:-both}" != hip ]; then
  toolkit=${CUDA_TOOLKIT:-$dest/cuda}
  [ -x "$toolkit/bin/nvcc" ] || tools/cuda/make_toolkit.sh "$toolkit"
  build cuda --cuda-toolkit "$toolkit"
fi
if [ "${ONLY:-both}" != cuda ]; then
  rocm=${ROCM:-$dest/rocm}
  [ -x "$rocm/llvm/bin/clang++" ] || python3 -m buildtools.rocm --full "$rocm"
  build hip --rocm "$rocm"
fi
echo "written: $record"
