"""The trainer's side: the strategy and its callback, and everything that knows Lightning.

``strategy`` hands Lightning's calls on, and shows users what is known; ``host_strategy`` is what a trainer hands to it.
``run`` owns the engine of one run and knows no trainer; ``loops`` says what it does around Lightning's batches and in their
steps, ``optimizer_steps`` what it does in those of optimizers (in the background where ``user_hooks`` allows it), and ``step_hooks`` around all.
``user_hooks`` says where user code could write weights. ``callback`` logs, and records timelines. Checkpoints are in
``checkpoint_io`` and ``frozen_weights``, those that all ranks write together in ``checkpoint_folder`` (read by
``folder_reader``); both write to ``part_files`` first. ``given_values`` of modules on the meta device come from them or from
``weight_files``.

``disk_tier`` decides what of the optimizers' state, of weights and of gradients is on a disk, and which weights stay in their
files, and ``readings`` is what a user asks a strategy.

With several devices ``rank_steps`` has optimizers step once for all, ``agreement`` keeps buffers alike and compares what
must be the same on all ranks, and ``processes`` whether as many were started as the trainer says and how they reach each
other. ``host_strategy`` chooses Lightning's base class by their number.

In come a LightningModule, the options of a user (``options``, which refuses what cannot be) and the calls of a trainer; out
go weights, files and lines in the log. This wing may import every wing but ``cli``. Only ``compat`` uses what is private in
Lightning, or differs between its versions or its two packages.
"""
