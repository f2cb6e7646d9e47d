"""The command line, ``python -m sp_lightning``.

``commands`` runs ``plan``, ``convert``, and those of Lightning's CLI. ``plan`` reads ``arguments``, loads a model without
memory (``model_source``), runs one batch of it without values (``model_estimate``, with ``host_step`` and
``below_memory`` for the host), predicts a range of windows (``answer``) and writes text or JSON (``report``).

In comes a list of arguments. Out go text and an exit status. This wing may import every wing; no wing imports it.
"""
