"""Ask a server questions and check its answers."""
