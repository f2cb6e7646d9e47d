"""Measured: this strategy, its rivals and the physical limit. README.md beside this file says how to run and read it."""
