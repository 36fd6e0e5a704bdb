"""CUDA toolkits: find, install, force as a pair, verify."""
