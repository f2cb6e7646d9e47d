"""Several trainings in threads of one process share what travels: the frozen weights that they have in common.

Each of them, a *trial*, has an engine of its own, with its own window and optimizer. ``common`` keeps one copy of what they have
in common on the host, and a few layers of it on the device, from which each trial's slots are filled; ``turns`` lets one trial
compute at a time and gives each the process's state as it left it; ``own`` is what no two trials may have; ``shared_base`` is
what users see. Nothing below knows of it: it comes in through the engine's :class:`~sp_lightning.engine.placement.Placement`.
"""
