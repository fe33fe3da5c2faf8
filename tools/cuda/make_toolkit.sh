#!/bin/bash
# make_toolkit.sh DEST    -- then: python build.py --backend cuda --cuda-toolkit DEST
# A CUDA toolkit folder that can build ggml-cuda on a machine that has nvcc but neither cuBLAS nor a driver:
# links to the installed toolkit, cuBLAS from its PyPI wheel (420 MB download), and a libcuda of empty functions to link against.
set -euo pipefail
dest=$(realpath -m "$1")
nvcc=$(readlink -f "$(command -v nvcc)")
toolkit=$(dirname "$(dirname "$nvcc")")
[ -d "$toolkit/targets" ] || toolkit=$(readlink -f /usr/local/cuda)
major=$("$toolkit/bin/nvcc" --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
mkdir -p "$dest.wheel"
python3 -m pip download -q --no-deps -d "$dest.wheel" "nvidia-cublas>=$major.1,<$major.2"
python3 - "$dest.wheel" <<'P'
import glob, sys, zipfile
folder = sys.argv[1]
with zipfile.ZipFile(glob.glob(folder + "/nvidia_cublas*.whl")[0]) as wheel:
    for name in wheel.namelist():
        if name.endswith(".h") or ".so" in name:
            wheel.extract(name, folder)
P
# files become links, folders are real (also those that are links in the toolkit), so nothing is written into the toolkit itself
rm -rf "$dest" && mkdir -p "$dest/targets/x86_64-linux"
for d in bin nvvm include lib; do
  [ -e "$toolkit/$d" ] || continue
  cp -rs "$(readlink -f "$toolkit/$d")" "$dest/$d"
done
[ -e "$dest/lib" ] || cp -rs "$(readlink -f "$toolkit/lib64")" "$dest/lib"
ln -s lib "$dest/lib64"
ln -s ../../include "$dest/targets/x86_64-linux/include"
ln -s ../../lib "$dest/targets/x86_64-linux/lib"
inc=$dest/include lib=$dest/lib
find "$dest.wheel" -name '*.h' -exec ln -sf {} "$inc/" \;
find "$dest.wheel" -name '*.so*' | while read -r so; do
  ln -sf "$so" "$lib/"; ln -sf "$so" "$lib/$(basename "$so" | sed 's/\.so.*/.so/')"
done
mkdir -p "$lib/stubs"
# every driver entry point that cuda.h declares, under its versioned name too
grep -ohE '\bcu[A-Z][A-Za-z0-9]*(_v[0-9]+)?\b' "$inc/cuda.h" | sort -u | sed 's/.*/void &(void) {}/' \
  | cc -x c - -shared -w -fno-builtin -Wl,-soname,libcuda.so.1 -o "$lib/stubs/libcuda.so"
rm -f "$dest.wheel"/*.whl
echo "$dest: nvcc $("$dest/bin/nvcc" --version | sed -n 's/.*release \([^,]*\),.*/\1/p'), cuBLAS $(ls "$lib" | grep -c cublas) files"
