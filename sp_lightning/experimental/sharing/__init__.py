"""Several trainings in threads of one process share the uploads of one model's frozen weights.

``SharedBase`` (``shared_base``) runs functions as *trials*. Each trial has its own engine, window and optimizer. A trial
implements two interfaces of the core: ``trainer.run_scope.RunScope``, which a run calls before it begins, and
``engine.placement.Placement``, which makes the parts of the run's engine. Without trials no code of this folder runs.

``common`` has the frozen weights, in one host memory, and copies of a few layers on the device, from which each trial's slots are
filled. ``turns`` lets one trial compute at a time, with its own random state. ``own`` records objects that no two trials may
share.
"""
