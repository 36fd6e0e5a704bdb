"""What vLLM is asked, adds to a command, and shows at its endpoints."""
