"""Tune: chooses the size of the window and what becomes of activations, by measurement or by prediction.

``tuner`` measures the first batches and chooses; ``choices`` knows which plans and modes fit the budget. ``simulator``
predicts how long a batch takes: it drives the engine's own schedule with the device of ``clocks``. ``visits`` describes
what a batch does and takes; ``dry_run`` finds that out from a model that has shapes only. ``machine`` measures whether
several devices fetch faster together, and what Python takes.

A plan, a timeline or a model comes in. A plan with k and k', modes of activations, and predictions go out. The wing may
import the engine and every wing below it.
"""
