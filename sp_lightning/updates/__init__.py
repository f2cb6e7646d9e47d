"""Updates: optimizer steps on the CPU, of all layers at once or layer by layer.

``background`` runs the updates of layers while the next forward, or the rest of backward, runs. ``fused`` says which steps run
fused, and which can be taken apart by layers. ``pieces`` widens, unscales, clips, steps and casts in a single pass over memory.
``step_context`` gives a step in the background the settings of the thread that has called ``optimizer.step()``. ``scaler`` is the
gradient scaler for gradients on the host; ``cpu_seconds`` estimates steps that compute long. ``layer_stepper`` is the interface
of steps on the GPU, ``gpu_bits`` that of steps on the CPU with a GPU's bits.

The user's optimizer and the layers (``layers``) come in. Updated weights in host memory go out; code that reads them waits for
them. ``engine.layerwise`` takes a step apart, and ``plan.update_policy`` decides whether it does.

User code must not notice that its optimizer's step runs layer by layer and in the background. Five things differ from what they
seem to be meanwhile. Each note says why nothing simpler is exact.

# Note: part of an optimizer

The step of one layer runs the ``step`` of the user's class on another object: one with the same attributes and the same state,
whose groups have only the layer's parameters. The functions of ``torch.optim`` would do for torch's optimizers, but not for a
class of the user's, and each would need its own code for state, schedules and flags. ``copy.copy`` loses attributes, because
``Optimizer.__getstate__`` leaves them out.

# Note: class that waits

While updates run, the user's optimizer has a class that derives from its own. Reading or setting ``state``, loading and pickling
it wait for the updates. torch has hooks for ``state_dict`` and ``load_state_dict``, but none for ``optimizer.state``.

# Note: empty groups

While torch's own ``step`` runs, after all hooks before it, the user's optimizer has no groups. So ``step`` returns at once, and
hooks, schedulers and ``step`` methods that call ``super().step()`` run as on plain Lightning. Replacing ``step`` on the object
would skip a user's own ``step``, and schedulers replace it, too.

# Note: roles of parameters

A host parameter whose update is under way, whose values are on the GPU alone, or whose gradient is narrow or freed, has a further
class (``layers.roles``). Code that reads what is not there waits, lands the layer, widens the gradient, or gets an error. A hook
on reads does not exist in torch, and tensors that wait by themselves are read by some functions without asking their class.

# Note: fused operator in pieces

In an update, a mode intercepts the one fused operator that torch's step calls in the end, and calls it, or a kernel of the
package, piece by piece. Everything before it stays torch's code: which parameters have gradients, state, step counts, settings.
"""
