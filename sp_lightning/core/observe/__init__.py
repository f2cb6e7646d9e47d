"""Reports of a run: counters, messages and pictures.

- ``activations``: counts the activations that autograd holds on a CPU.
- ``metrics``: the metrics of a run, and the lines in the log that explain its counters.
- ``messages``: notes that are added to errors, and errors that replace unclear ones of torch's.
- ``machine``: the properties of a machine that its speed depends on.
- ``plot``: draws one batch or a range of windows with matplotlib, if that is installed.

The inputs are numbers, intervals (``device.timeline``) and plans; the outputs are text and files. This folder may import
``device``, ``model`` and ``plan``.
"""
