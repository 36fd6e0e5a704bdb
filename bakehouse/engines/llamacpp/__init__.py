"""llama.cpp: how it is configured, accepted, served."""
