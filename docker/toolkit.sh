#!/bin/sh
# toolkit.sh ROOT: what the CUDA toolkit below ROOT is, for whoever judges it without having it here:
# nvcc's own words, the headers that name versions, and where every link leads. Runs after configure.
set -u
root=$1
out=/build/evidence/toolkit
mkdir -p "$out/files"

say() { # NAME ARGUMENTS…: what nvcc says, under another name where it fails
  name=$1
  shift
  "$root/bin/nvcc" "$@" >"$out/$name" 2>&1 || mv "$out/$name" "$out/$name.failed"
}
say version --version
say help --help
say dryrun --dryrun -c nothing.cu

line() { # real path, bytes, path
  [ -e "$1" ] && printf '%s\t%s\t%s\n' "$(readlink -f "$1")" "$(stat -Lc %s "$1")" "$1"
}
real=$(readlink -f "$root")
{
  for path in "$root" "$root/bin/nvcc" "$real" "$real/bin/nvcc" \
    /usr/lib/x86_64-linux-gnu/libcuda.so /usr/lib/aarch64-linux-gnu/libcuda.so /usr/lib64/libcuda.so; do
    line "$path"
  done
  for base in "$real" "$real"/targets/*; do
    for path in "$base/include" "$base"/include/cuda.h "$base"/include/cuda_runtime_api.h \
      "$base"/include/crt/host_config.h "$base/lib64" "$base/lib" "$base"/lib64/libcu*.so \
      "$base"/lib/libcu*.so "$base/lib64/stubs/libcuda.so" "$base/lib/stubs/libcuda.so"; do
      line "$path"
    done
  done
  # Whatever CMake chose, wherever it lies.
  {
    grep -E '^(CUDA|CMAKE_CUDA)' /build/build/CMakeCache.txt | sed 's/^[^=]*=//'
    sed -n 's/.*Found CUDAToolkit: \([^(]*\).*/\1/p' /build/evidence/configure.log
  } | tr ';' '\n' | sed 's/ *$//' | grep '^/' | sort -u | while read -r path; do line "$path"; done
} >"$out/paths"
# The two that are needed after the build: to tell a copy by, and in place of a driver.
for path in "$real"/lib64/libcudart.so "$real"/lib/libcudart.so; do
  [ -e "$path" ] && sha256sum "$(readlink -f "$path")"
done >"$out/hashes"
for path in "$real"/lib64/stubs/libcuda.so "$real"/lib/stubs/libcuda.so; do
  [ -e "$path" ] && mkdir -p "$out/stub" && cp -L "$path" "$out/stub/libcuda.so.1"
done
cut -f 3 "$out/paths" | grep '\.h$' | sort -u | while read -r path; do
  mkdir -p "$out/files$(dirname "$path")"
  head -c 1048576 "$path" >"$out/files$path"
done
exit 0
