"""Weight files: what their headers declare, read without loading a tensor."""
