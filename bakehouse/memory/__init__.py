"""Memory: what a server needs, what a machine has, what fits."""
