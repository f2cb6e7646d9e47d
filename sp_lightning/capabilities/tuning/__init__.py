"""Chooses k and k': it measures the first batches and predicts the others by simulation.

**Adds** the choice for ``k="auto"``, ``k_prime="auto"``, ``gpu_layers="auto"``, and switches the
offloading of ``activations="auto"``. **Enters** through
``engine.tuner.BaseTuner``, which ``registry.make_tuner`` resolves once the engine is built. **Unused** (no option is ``"auto"``,
or nothing limits GPU memory) it is not imported: the run has a ``BaseTuner``, whose methods do nothing between batches. Without
the folder the first plan stays, and one line is logged.

- ``tuner``: measures batches, chooses, and makes room after the GPU has run out of memory.
- ``choices``: the fastest window that fits the budget.
- ``simulator``: predicts how long a batch takes. It drives the engine's own schedule with the device of ``clocks``.
- ``visits``: what a batch does and how fast the machine is, measured from a timeline.
- ``machine``: the Python time of a layer call.

The planner uses these predictions, too. The folder predicts the work of other capabilities, so it may import them.
"""
