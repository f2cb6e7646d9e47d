"""The trainer's side: the strategy and its callback, and everything that knows Lightning.

``strategy`` has the user's options, set-up and checkpoints; it derives from ``loops``, which is what Lightning's loops call and
what a user can ask, and that from ``host_strategy``, which is what a trainer hands to a strategy. ``run`` owns what lasts as long
as one run: its engine, its optimizers' steps, the buffers of several devices. ``optimizer_steps`` says what happens in the steps
of the trainer's optimizers (in the background where ``user_hooks`` allows it), and ``step_hooks`` around those of all.
``user_hooks`` says where user code could write weights. ``callback`` logs, and records timelines. Checkpoints are in
``checkpoint_io`` and ``frozen_weights``, those that all ranks write together in ``checkpoint_folder`` (read by
``folder_reader``); both write to ``part_files`` first. ``given_values`` of modules on the meta device come from them or from
files of weights.

With several devices ``rank_steps`` has optimizers step once for all. ``agreement`` compares what must be the same on all ranks,
and says whether as many processes were started as the trainer says and how they reach each other.
``host_strategy`` chooses Lightning's base class by their number.

In come a LightningModule, the options of a user (``options``, which refuses what cannot be) and the calls of a trainer; out
go weights, files and lines in the log. This wing may import every wing but ``cli``. Only ``compat`` uses what is private in
Lightning, or differs between its versions or its two packages.
"""
