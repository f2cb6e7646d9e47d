"""The command line, ``python -m sp_lightning`` and ``superpipeline``.

**Adds** the commands ``plan``, ``rates``, ``convert``, and those of Lightning's CLI with the strategy registered. **Enters** in
``sp_lightning.__main__``; the command ``check`` is in ``comparison``. **Unused** it is not imported. A plan uses the predictions
of ``tuning`` and the modes of ``activations``; other capabilities are imported for the options that need them.

The command ``plan`` runs these files in order:

- ``arguments``: the arguments, a ``Question``. It does not import torch, so that ``--help`` is fast.
- ``plan_command``: asks each question and prints the answers.
- ``model_source``: makes a model without memory (``fake``). ``images`` and ``diffusion`` make the inputs of vision and diffusion
  models, ``adapters`` are for ``--lora``, and ``scaling`` for ``--scale``.
- ``estimate``: runs a batch without values (``dry_run``, ``known_values``), and counts what the host needs (``host``).
- ``answer``: predicts a range of windows; ``trials`` several trainings at once; ``budget`` plans ``--hours``.
- ``remedies``: what would fit, if nothing does. ``verdict`` and ``report`` put the answer into words.

``rates`` measures a machine; ``measured`` reads its file and the reports of runs. ``commands`` has ``convert`` and the CLI of
Lightning.
"""
