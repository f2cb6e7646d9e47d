"""Several trainings in threads of one process share the uploads of the frozen weights that they have in common.

``SharedBase`` (``shared_base``) runs functions as *trials*. Each trial has its own engine, window and optimizer. It enters at two
interfaces of the core: ``trainer.run_scope.RunScope``, which a run asks before it begins, and ``engine.placement.Placement``,
which makes the parts of its engine. Without trials no code of this folder runs.

``common`` keeps one copy of the common weights on the host, and a few of its layers on the device, from which each trial's slots
are filled. ``turns`` lets one trial compute at a time, and restores the state of the process that it had. ``own`` holds the
objects that no two trials may share.
"""
