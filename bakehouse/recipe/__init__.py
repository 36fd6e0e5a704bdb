"""Recipes: intent. What is wanted, in YAML, strict, with the place of every fault."""
