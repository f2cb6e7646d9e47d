"""Experimental capabilities: equal to plain Lightning on the CPU, with little or no proof on the hardware that they are for.

- ``ranks``: several devices. It has not run with NCCL yet.

They enter as capabilities do (``sp_lightning.capabilities``), and get no new work until that proof exists.
"""
