"""Decisions before a step runs. Plans and policies are frozen objects. Nothing in this folder copies or allocates memory.

- ``choices`` has the types of options, and hints for options of other libraries.
- ``plan`` gives every layer its place in memory and its slots (``rings``); ``window`` decides which plans fit the GPU.
- ``update_policy`` decides where, when and how layers are updated.
- ``ledger`` counts the host memory that training uses.
- ``units`` formats and parses numbers of bytes.

The inputs are the layers that were found, the options, and facts. This folder may import ``device`` and ``model``.
"""
