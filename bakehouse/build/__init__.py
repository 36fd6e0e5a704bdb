"""Run a plan: builds and images."""
