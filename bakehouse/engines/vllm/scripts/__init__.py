"""Scripts that run inside an image; they import nothing of ours."""
