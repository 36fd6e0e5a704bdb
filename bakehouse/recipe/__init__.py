"""Recipes: types, loading, validation, command templates."""
