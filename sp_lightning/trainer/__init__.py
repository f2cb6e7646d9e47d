"""The trainer's side: the strategy and its callback, and everything that knows Lightning.

``strategy`` has the user's options, set-up and checkpoints; it derives from ``loops``, which is what Lightning's loops call and
what a user can ask, and that from ``host_strategy``, which is what a trainer hands to a strategy. ``run`` owns what lasts as long
as one run: its engine and its optimizers' steps. ``optimizer_steps`` says what happens in the steps
of the trainer's optimizers (in the background where ``user_hooks`` allows it), and ``step_hooks`` around those of all.
``user_hooks`` says where user code could write weights. ``callback`` logs, and records timelines. Checkpoints are in
``checkpoint_io`` and ``frozen_weights``, written to ``part_files`` first. ``given_values`` of modules on the meta device come
from them or from files of weights.

``group`` is the interface to the other processes that train the module: none on one device. ``host_strategy`` chooses the
strategy's base class of Lightning by the number of devices.

In come a LightningModule, the options of a user (``options``, which refuses what cannot be) and the calls of a trainer; out
go weights, files and lines in the log. This wing may import every wing but ``cli``. Only ``compat`` uses what is private in
Lightning, or differs between its versions or its two packages.
"""
