#!/bin/sh
# collect.sh TARGET…: the targets, every library of the build that they load, and modules that are
# loaded while running; stripped, with fixed modes, in /out/bin.
set -eu
built=/build/build/bin
out=/out/bin
umask 022
mkdir -p "$out"
for target in "$@"; do
  cp -L "$built/$target" "$out/$target"
done
if grep -q '^GGML_BACKEND_DL:BOOL=ON' /build/build/CMakeCache.txt; then
  cp -L "$built"/libggml-*.so "$out/"
fi
again=yes
while [ "$again" = yes ]; do
  again=no
  for file in "$out"/*; do
    for name in $(readelf -d "$file" 2>/dev/null | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'); do
      if [ -e "$built/$name" ] && [ ! -e "$out/$name" ]; then
        cp -L "$built/$name" "$out/$name"
        again=yes
      fi
    done
  done
done
for file in "$out"/*; do
  strip --strip-all "$file"
  case $file in
    *.so | *.so.*) chmod 644 "$file" ;;
    *) chmod 755 "$file" ;;
  esac
done
