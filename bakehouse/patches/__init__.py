"""Patches: diffs, manifests, fetching, pinning, applying; the patched source tree."""
