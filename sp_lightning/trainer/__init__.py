"""The trainer's side: the strategy, its callback, and all code that depends on Lightning.

**These lines suffice to change a step.** Read :mod:`sp_lightning.core.engine` first.

1. Lightning calls the strategy (``strategy``, and ``loops`` for the methods of a batch). ``setup`` makes a
   :class:`~sp_lightning.trainer.run.Run`, which lasts until ``teardown``: ``fit`` with its validation, or one ``validate``,
   ``test`` or ``predict``. A run finds the layers, plans, and builds the engine
   (:class:`~sp_lightning.core.engine.engine.Engine`).
2. ``Run.step`` surrounds ``training_step`` with the engine's ``begin`` and ``await_backward``, and every other step with
   ``begin`` and the engine's end of a step.
3. ``optimizer_steps`` replaces Lightning's optimizer step, so that layers are stepped one by one, in the background if possible.
   ``step_hooks`` are torch's hooks around every step: before it, the host has all weights; after it, copies on the GPU are stale.
4. ``checkpoint_io`` and ``strategy`` save and load. ``callback`` logs and draws. ``options`` has what the user has passed.

All that follows is for reference.

**One training batch** (automatic optimization). The order is Lightning's. Rows 3 to 9 are inside of row 2, and rows 4 to 7 are
the closure:

==  ===========================  ===========================================================================================
    Lightning or torch calls     what happens
==  ===========================  ===========================================================================================
1   on_train_batch_start         ``loops._batch_starts`` runs deferred signals. ``Run.batch_starts`` adapts the engine to a
                                 changed module. If a hook may have written weights: ``Engine.invalidate``. The tuner may
                                 change k, k' and modes of activations. If no code can write weights before row 4:
                                 ``Engine.prefetch_for``.
2   optimizer_step               ``OptimizerSteps.run``: replaces the precision plugin's clipping, and calls Lightning's step with
                                 a closure that calls Lightning's closure.
3   torch's hooks before a step  ``StepHooks.before``, then the user's hooks, then ``StepHooks._enter``. ``before`` and ``_enter``
                                 prepare the engine with ``Updating.before``: it copies weights that were written on the device to
                                 the host, and waits for updates if torch's code will write weights itself. ``before`` also wraps
                                 the closure. The wrapped closure begins with ``Updating.resume``, and ends with
                                 ``Updating.before``.
4   training_step                ``Run.step``: ``Engine.begin`` puts device parameters into the modules, the forward runs in
                                 ``Engine.saving``, and ``Engine.await_backward`` makes the step end with its backward.
5   optimizer_zero_grad          The strategy is not called. If a user's hook runs, modules hold host parameters (*seen*).
6   pre_backward, post_backward  ``Engine.announce_backward``, then autograd calls the engine, which ends its step with the
                                 graph task (``Backward._outermost_has_ended``). With updates in backward, the engine calls
                                 ``LayerwiseStep`` for each layer whose gradients are complete. If there was no backward,
                                 ``post_backward`` ends the step.
7   on_before_optimizer_step,    ``StepHooks.prepare_after_closure`` has prepared the engine. If layers are updated one by one,
    clipping                     the replaced methods of row 2 only record the clipping, and each update clips. Exception: if a
                                 hook may read gradients, or all layers step on the GPU, they clip at once, layer by layer.
8   the optimizer's own code     Before it, ``StepHooks._change_groups``: ``LayerwiseStep.submit`` gives the remaining layers to
                                 the background, and the optimizer finds no groups. If the step cannot be divided into layers,
                                 the optimizer updates the host's weights itself, fused if possible.
9   torch's hooks after a step   ``StepHooks.give_back_groups``, the user's hooks, ``StepHooks.after``: ``Engine.invalidate``,
                                 because copies on the device are out of date.
10  on_train_batch_end           ``callback``: if no hook may write weights before the next batch,
                                 ``loops._expect_next_batch`` prefetches.
==  ===========================  ===========================================================================================

- A batch whose gradients are only accumulated has no rows 2, 3, 7, 8 and 9: Lightning calls the closure directly.
- In manual optimization, the training step of row 4 calls ``manual_backward`` (row 6) and ``optimizer.step`` (rows 2, 3 and 7 to
  9, with an empty closure and without clipping). ``Step.pause`` shows host parameters after each backward. ``Run.step`` ends
  the engine's step.
- Validation, test and prediction have ``loops._step`` only. It calls ``Run.batch_starts`` and ``Run.step``, which ends the
  engine's step.
- Steps that Lightning does not call (a user's own optimizer) have rows 3, 8 and 9: torch's hooks see all optimizers.

**Set-up and teardown**, in order:

=========================  =============================================================================================
Lightning calls            what happens
=========================  =============================================================================================
strategy.connect           If the trainer has no callback of this package, attaches one.
callback.setup             Creates the file of a picture, so that an error is raised before training.
restoring weights          ``strategy.load_checkpoint``, ``strategy.load_model_state_dict``. There is no run yet.
strategy.setup             Fills modules on the meta device (``given_values``). ``loops.model_to_device`` makes the ``Run``, which
                           finds layers, plans, and builds the engine. In ``fit``: makes the optimizers, then
                           ``loops._fitting_begins``: ``OptimizerSteps.begin`` decides where and when they step, and host
                           memory is reserved.
on_fit_start, then         User code, and ``strategy.load_optimizer_state_dict``. Then Lightning installs its signal handlers.
restoring optimizers
on_…_start of a loop       ``loops._loop_begins``: defers signal handlers from now on. In training, decides again where and when
                           optimizers step.
on_train_end               ``Run.finish_updates``: the host has all weights.
on_exception               After an error only: ``Run.abort`` ends the engine's step and restores host parameters.
strategy.teardown          Detaches its callback. ``Run.close`` closes the engine and restores the optimizers.
callback.teardown          Only of a callback that the user has made, and only without an error: restores the log's level,
                           removes empty files.
=========================  =============================================================================================

**Words.**

- *closure*: the function that runs forward and backward, which an optimizer's step calls. There are three, one around the other:
  Lightning's (rows 4 to 6); the closure of ``OptimizerSteps.run``, which prepares for row 7; and the closure that torch's
  optimizer gets (the precision plugin's, with row 7), which ``StepHooks`` wraps.
- *quiet*: no code can have written weights without the engine's notice. Of a step: since the last step or prefetch. Of a
  backward: since the forward. Copies on the device then stay valid. ``user_hooks`` finds the hooks that could write weights.
- *seen*: a user's hook runs between forward and backward, and may read gradients or weights. Modules hold host parameters then.
- *freed*: with ``optimizer_overlap="backward"``, gradients may be freed after their layer's update. Reading the ``param.grad``
  of a freed gradient is an error. After the next training step has called ``OptimizerSteps.forget_freed``, it returns None.
- *torn*: some weights have the values of a new step, and others do not yet; or Lightning has not counted the step. A checkpoint
  would be wrong. Weights are torn for a while in each step. If an error leaves the weights torn,
  ``BackgroundUpdates.torn`` is the reason, and saving raises an error (``loops._refuse_partially_updated``).
- *deferred signal*: a signal that arrived in a batch. ``signals`` runs its handler between two batches.

**The parts.**

The strategy and its run:

- ``strategy`` has the user's options, set-up and checkpoints. Its class derives from the one in ``loops`` (the methods that
  Lightning's loops and users call). The class in ``loops`` derives from the one in ``host_strategy`` (the methods that the
  trainer's set-up calls), which chooses Lightning's base class by the number of devices.
- ``options`` has the options, and ``option_checks`` checks each.
- ``run`` owns the objects of one run: its engine and its optimizers' steps.
  ``host_memory`` says how much CPU memory a run can have. ``tuner`` is the interface by which windows and modes change.
- ``group`` is the interface to the other processes that train the module. On one device there are no other processes.

Optimizer steps:

- ``update_facts`` collects the facts for ``plan.update_policy``.
- ``optimizer_steps`` runs the steps of the trainer's optimizers, in the background if possible; ``step_hooks`` are hooks on the
  steps of all optimizers.
- ``user_hooks`` finds the points at which user code could write weights.
- ``scaler`` is the gradient scaler for gradients on the host.

Checkpoints and files:

- ``checkpoint_io`` writes and reads checkpoints. ``part_files`` creates the files, so that a checkpoint is complete or absent.
- ``frozen_weights`` leaves frozen weights out of checkpoints, and adds them when a checkpoint is loaded.
- ``given_values`` fills modules on the meta device from a checkpoint or a file of weights, which ``weight_files`` reads.

``callback`` logs (``plan_text``, ``metrics``), and draws a batch (``plot``). ``compile`` is ``sp_lightning.compile_blocks``.
``signals`` defers signal handlers. Only ``compat`` uses private names of Lightning, or depends on its version or on its two
packages. This folder may import the core and the registry. It also has what the core does not use, and a run does.
"""
