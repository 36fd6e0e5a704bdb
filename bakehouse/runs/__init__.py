"""Records of runs, and their index."""
