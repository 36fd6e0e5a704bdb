"""What a recipe needs in memory, against what a machine has: arithmetic, nothing loaded."""
