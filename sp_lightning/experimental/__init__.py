"""Experimental capabilities: equal to plain Lightning on the CPU, and never run on the hardware that they are for.

- ``ranks``: several devices. It never ran with NCCL.
- ``sharing``: several trainings share one frozen base on one GPU.

They enter as capabilities do (``sp_lightning.capabilities``), and get no new work until they have run there.
"""
