"""Signatures of log lines, and the scanner."""
