"""Runs a user's own model with plain Lightning and with the strategy. Compares the two bit by bit, and measures k and k'.

**Adds** ``sp_lightning.check`` and ``sp_lightning.dial``, and the commands ``check`` and ``dial``.
**Enters** through ``registry.PUBLIC``, the public names that are imported when they are first used, and registers ``command``
with the command line. **Unused** this folder is not imported.

- ``check``: decides which runs are made, and what their differences mean.
- ``subject``: makes the module, the data and the trainer's settings anew for each run; ``configured`` reads them from a config.
- ``runs``: runs one variant. ``reference`` is the strategy of plain Lightning if optimizers step on the CPU.
- ``record``: the values of a run, in files, and their comparison.
- ``report``: the result as a table and as JSON.
- ``dial``: memory and time of some windows, as a table and a page. ``activations`` counts activations on a CPU.
- ``first_check``: a check without a model: small models in several modes, and rates, in one file for a report.
- ``small_models``: models for both.
- ``command``, ``options``: the command line. These files do not import torch.

Both leave nothing behind: no file, no random state, no environment variable.
"""
