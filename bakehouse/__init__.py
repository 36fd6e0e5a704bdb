"""Bakehouse: local LLM servers from pinned sources, ready only when proven correct."""

__version__ = "0.1.0"
