"""Records of runs: a folder for each run, and an SQLite index."""
