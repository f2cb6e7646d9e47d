"""Comparison: a user's own model, trained by plain Lightning and by this strategy, and everything of it compared bit by bit.

``check`` decides which runs there are and what their differences say; ``subject`` makes the module, the data and the trainer's
settings anew for each of them, ``runs`` runs one, and ``reference`` is the strategy of plain Lightning where optimizers step on
the host. What a run leaves is in a ``record``, which is files. ``explain`` looks for the first module that differs and for an
option that avoids it; ``report`` has the answer as a table and for programs.

A factory, data and options come in. A report goes out, and nothing else stays: no file, no random state, no variable. The wing
may import every wing but ``cli``.
"""
