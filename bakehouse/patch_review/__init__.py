"""Compare a server with a patch to one without it."""
