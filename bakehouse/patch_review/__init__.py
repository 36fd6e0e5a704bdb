"""What a patch does to a server, with and without it."""
