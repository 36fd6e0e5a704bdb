"""Weight files: headers, shards, shapes, resharding."""
