"""The command line, ``python -m sp_lightning``.

``commands`` runs ``plan``, ``convert``, and those of Lightning's CLI. ``plan`` goes one way: ``arguments`` are a question;
``model_source`` makes a model without memory, ``images`` and ``diffusion`` the inputs of vision and diffusion models;
``estimate`` runs a batch of it without values and keeps what that shows in a frozen record, with what ``host`` counts;
``answer`` predicts a range of windows; ``remedies`` asks what would fit if nothing does; ``verdict`` and ``report`` put it into
words. ``adapters`` are for ``--lora``.

In comes a list of arguments. Out go text and an exit status. This wing may import every wing; no wing imports it.
"""
