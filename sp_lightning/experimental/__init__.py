"""Experimental capabilities: equal to plain Lightning on the CPU, with little or no proof on the hardware that they are for.

- ``ranks``: several devices. It has not run with NCCL yet.
- ``sharing``: several trainings share one frozen base on one GPU. Its tests passed on an H100; its speed was not measured.

They enter as capabilities do (``sp_lightning.capabilities``), and get no new work until that proof exists.
"""
