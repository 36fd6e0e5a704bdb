"""Where sources, weights and images come from: git, archives, the Hub, PyPI, registries."""
