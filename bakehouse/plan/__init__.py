"""Plans: every step of build and serve, pure and printable."""
