"""Side effects: child processes, git, HTTP, downloads, the Docker Engine, the clock."""
