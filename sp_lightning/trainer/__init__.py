"""The trainer's side: the strategy, its callback, and all code that depends on Lightning.

The strategy and its run:

- ``strategy`` has the user's options, set-up and checkpoints. It derives from ``loops`` (the methods that Lightning's loops and
  users call), and that from ``host_strategy`` (the methods that the trainer's set-up calls), which chooses Lightning's base class
  by the number of devices.
- ``options`` checks the options.
- ``run`` owns the objects of one run: its engine and its optimizers' steps. ``run_scope`` has the rules for runs in threads.
- ``group`` is the interface to the other processes that train the module. On one device there are none.

Optimizer steps:

- ``update_facts`` collects the facts for ``plan.update_policy``; ``step_place`` is the interface of steps on the GPU.
- ``optimizer_steps`` runs the steps of the trainer's optimizers, in the background if possible; ``step_hooks`` are hooks on the
  steps of all optimizers.
- ``user_hooks`` finds the points at which user code could write weights.

Checkpoints and files:

- ``checkpoint_io`` and ``frozen_weights`` write and read checkpoints, through files of ``part_files``.
- ``given_values`` fills modules on the meta device from a checkpoint or a file of weights.

``callback`` logs, and records timelines. ``signals`` defers signal handlers. Only ``compat`` uses private names of Lightning, or
depends on its version or on its two packages. This folder may import all other folders of the core.
"""
