"""Demonstrations: each shows one ability of the engine, most beside plain Lightning. Recipes to copy are one folder above."""
