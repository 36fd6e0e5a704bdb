"""Records: what happened, kept. One folder a run, and an index in SQLite."""
