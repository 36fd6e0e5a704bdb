"""The Docker Engine."""
