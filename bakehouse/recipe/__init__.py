"""Recipes: strict YAML files, with the place of every fault."""
