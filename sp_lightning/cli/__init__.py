"""The command line, ``python -m sp_lightning``.

``plan`` reads arguments (``arguments``), loads a model without memory (``model_source``), runs one batch of it without
values (``model_estimate``), predicts a range of windows (``answer``) and writes text or JSON (``report``). ``fit``,
``validate``, ``test`` and ``predict`` are those of Lightning's CLI (``lightning_command``). ``convert`` makes a file of a
checkpoint that all ranks have written, and the other way round (``convert_command``).

In comes a list of arguments. Out go text and an exit status. This wing may import every wing; no wing imports it.
"""
