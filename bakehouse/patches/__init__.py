"""Patches: fetched and pinned, tried against sources, judged by what they do."""
