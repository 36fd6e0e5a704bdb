"""Servers: start, supervise, verify, report and stop them."""
