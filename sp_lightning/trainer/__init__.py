"""The trainer's side: the strategy and its callback, and everything that knows Lightning.

``strategy`` hands Lightning's calls on, and shows users what is known; ``host_strategy`` is what a trainer hands to it.
``run`` owns the engine of one run and knows no trainer; ``loops`` says what it does around Lightning's batches, with one
step each in ``batch`` (repeated where ``retry`` allows it) and in ``optimizer_steps`` (in the background where
``update_policy`` allows it). ``user_hooks`` says where user code could write weights. ``callback`` logs and records
(``recording``). Checkpoints are in ``checkpoint_io`` and ``frozen_weights``, those that all ranks write together in
``checkpoint_folder`` (``folder_writer``, ``folder_reader``); both write to ``part_files`` first. ``given_values`` of modules on
the meta device come from them or from ``weight_files``.

``disk_tier`` decides what of the optimizers' state is on a disk, ``weights_in_place`` which weights stay in their files,
``weights_on_scratch`` which trained ones are on the disk, and ``readings`` is what a user asks a strategy.

With several devices ``rank_steps`` has optimizers step once for all, ``agreement`` keeps buffers alike and compares what
must be the same on all ranks, ``processes`` whether as many were started as the trainer says and how they reach each other, and
``refusals`` says what they cannot do. ``host_strategy`` chooses Lightning's base class by their number.

In come a LightningModule, the options of a user (``options``) and the calls of a trainer; out go weights, files and lines
in the log. This wing may import every wing but ``cli``. Only ``compat`` uses what is private in Lightning, or differs
between its versions or its two packages.
"""
