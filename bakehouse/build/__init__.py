"""Carry out a build plan: configure, accept, compile, install, verify; an artifact or nothing."""
