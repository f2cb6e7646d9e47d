"""Predicts how long a batch takes, by simulation.

- ``simulator``: the engine's own schedule on the device of ``clocks``, which copies nothing and only counts time.
- ``visits``: what a batch does, how fast the machine is, and the prediction that follows.
- ``machine``: the Python time of a layer call.
"""
