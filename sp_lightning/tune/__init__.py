"""Tune: how large the window is to be, and what becomes of activations; by measuring, or by prediction.

``tuner`` measures two batches and chooses; ``window`` knows what fits the budget; ``activation_choice`` chooses for each layer.
``simulator`` predicts a batch's time by driving the engine's own schedule with a device of ``clocks``; ``visits`` says
what a batch does, ``dry_run`` finds that out without values, from a model that has shapes only.

Comes in: a plan, a timeline or a model. Goes out: a plan with k and k', modes of activations, predictions. It may import the
engine and every wing below it.
"""
