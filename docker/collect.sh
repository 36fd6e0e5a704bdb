#!/bin/sh
# collect.sh TARGET…: the targets, every library of the build and of the toolkit below CUDA_ROOT that
# they load, and modules that are loaded while running; with fixed modes, in /out/bin. What was built
# is stripped. The driver's libcuda.so.1 belongs to the machine and stays out.
set -eu
built=/build/build/bin
out=/out/bin
umask 022
mkdir -p "$out"

take() { # FILE NAME
  cp -L "$1" "$out/$2"
  case $2 in
    *.so | *.so.*) chmod 644 "$out/$2" ;;
    *) chmod 755 "$out/$2" ;;
  esac
}
own() { # FILE NAME
  take "$1" "$2"
  strip --strip-all "$out/$2"
}

for target in "$@"; do
  own "$built/$target" "$target"
done
if grep -q '^GGML_BACKEND_DL:BOOL=ON' /build/build/CMakeCache.txt; then
  for file in "$built"/libggml-*.so; do
    own "$file" "${file##*/}"
  done
fi
again=yes
while [ "$again" = yes ]; do
  again=no
  for file in "$out"/*; do
    for name in $(readelf -d "$file" 2>/dev/null | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'); do
      [ -e "$out/$name" ] && continue
      if [ -e "$built/$name" ]; then
        own "$built/$name" "$name"
        again=yes
        continue
      fi
      [ -n "${CUDA_ROOT:-}" ] || continue
      for folder in "$CUDA_ROOT/lib64" "$CUDA_ROOT/lib"; do
        if [ -e "$folder/$name" ]; then
          take "$folder/$name" "$name"
          again=yes
          break
        fi
      done
    done
  done
done
