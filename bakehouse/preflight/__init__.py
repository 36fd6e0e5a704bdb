"""What is refused before anything is built or started."""
