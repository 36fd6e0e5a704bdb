"""Helpers that any package may use; they import nothing above them."""
