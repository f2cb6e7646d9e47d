"""Chooses k by the stalls of the first batches, and keeps every batch within the budget of GPU memory.

**Adds** the choice for ``k="auto"``, and switches the offloading of ``activations="auto"``. **Enters**
through ``trainer.tuner.BaseTuner``, which ``registry.make_tuner`` resolves once the engine is built. **Unused** (no option is
``"auto"``, or nothing limits GPU memory) it is not imported: the run has a ``BaseTuner``, whose methods do nothing between
batches. Without the folder the first plan stays, and one line is logged.

- ``tuner``: measures batches, changes the plan, and makes room after the GPU has run out of memory.
- ``choices``: the rule by which k grows.
"""
