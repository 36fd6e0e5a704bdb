"""CUDA toolkits: found, provided, forced as a pair, accepted from CMake's own words."""
