"""The command line, ``python -m sp_lightning`` and ``superpipeline``.

**Adds** the commands ``plan`` and ``rates``, and the commands of Lightning's CLI with the strategy registered.
**Enters** in ``sp_lightning.__main__``; the command ``check`` is in ``comparison``. **Unused**, it is not imported. A plan uses
the modes of ``activations``; other capabilities are imported for the options that need them.

The command ``plan`` uses these files in this order:

- ``arguments``: parses the arguments into a ``Question``. It does not import torch, so that ``--help`` is fast.
- ``plan_command``: answers the question and prints the answer.
- ``model_source``: builds a model without memory (``fake``). ``images`` builds the inputs of vision models;
  ``adapters`` implements ``--lora``.
- ``estimate``: runs a batch without values (``dry_run``, ``known_values``), and computes the host memory (``host``).
  ``cpu_seconds`` has the costs of steps that compute longer than they read and write memory.
- ``answer``: predicts each window of a range (``prediction``).
- ``verdict`` and ``report``: format the answer.

``rates`` measures a machine; ``measured`` reads the file with its rates. ``lightning_cli`` has Lightning's
commands.
"""
