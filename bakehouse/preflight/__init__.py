"""What can be known to fail before anything is built or loaded."""
