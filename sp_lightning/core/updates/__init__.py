"""Updates: optimizer steps on the CPU, of all layers at once or layer by layer.

An *update* is the optimizer's step of one layer.

- ``background`` runs updates while the next forward, or the rest of backward, runs.
- ``fused`` decides which steps run fused, and which can be divided into updates of layers.
- ``pieces`` widens, unscales, clips, steps and casts in a single pass over memory.
- ``step_context`` gives a step in the background the settings of the thread that called ``optimizer.step()``.
- ``layerwise`` divides a step into updates of layers, if ``plan.update_policy`` says so. ``clipping`` measures the norms of
  gradients during backward. ``updating`` is the engine as both see it.
- ``layer_stepper`` is the interface of steps on the GPU, ``state_store`` that of optimizer state outside of memory.

Input: the user's optimizer and the layers (``weights``). Output: updated weights in host memory; code that reads them waits for
the update. This folder imports nothing of the engine, except the class for annotations.

User code must not notice that its optimizer's step runs layer by layer and in the background. Five mechanisms ensure this. Each
has a note that says why a simpler solution would not be exact.

# Note: part of an optimizer

The step of one layer runs the ``step`` of the user's class on another object: one with the same attributes and the same state,
whose groups have only the layer's parameters. The functions of ``torch.optim`` (for example ``adam``) would suffice for torch's
optimizers, but not for a user's class, and each would need its own code for state, schedules and flags. ``copy.copy`` loses
attributes, because ``Optimizer.__getstate__`` leaves them out.

The parameters that stay on the GPU (``gpu_layers``) are one such part. A step that is not divided into layers has its groups
divided by place instead (``trainer.step_hooks``).

# Note: class that waits

While updates run, the user's optimizer has a class that derives from its own class. Code that reads or sets ``state``, loads a
state or pickles the optimizer waits for the updates. torch has hooks for ``state_dict`` and ``load_state_dict``, but not for
``optimizer.state``.

# Note: empty groups

While torch's own ``step`` runs, after all hooks before it, the user's optimizer has no groups. So ``step`` returns at once, and
hooks, schedulers and ``step`` methods that call ``super().step()`` run as on plain Lightning. Replacing ``step`` on the object
would skip a user's own ``step``; and schedulers replace ``step`` on the object as well.

# Note: roles of parameters

Around updates, a host parameter gets a further class (``weights.roles``) in three cases. When code reads the parameter's
values or its gradient, that class

- waits, if the parameter's update is under way;
- widens the gradient, if it is *narrow*: kept in the lower dtype in which backward computed it;
- raises an error, if the gradient is freed.

torch has no hook on reads. A tensor subclass for the gradient itself would not suffice: some functions of torch read tensors
without calling their class.

# Note: fused operator in pieces

In an update, a mode intercepts the one fused operator that torch's step calls at its end. The mode calls that operator piece by
piece. All code before the operator stays torch's: which parameters have gradients, state, step counts, settings.
"""
