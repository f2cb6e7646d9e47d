"""Engine: streams the layers of one module while steps run. It decides *when*; what lies where is the plan's business.

One layer's forward, then its backward. The numbers stand beside the lines that do it, here and in ``weights``::

    host block ──fetch──▶ slot ──use──▶ device parameters ──▶ forward ──release──▶ slot may be overwritten
                  (1)          (2)            (3)               (4)        (5)
    param.grad ◀──apply── staging ◀──drain── gradient ◀── backward ◀──use── unpack ◀── fetched again
                  (9)                 (8)                    (7)              (6)

The parts, from below; each imports those before it only:

- ``residency``: which layers are on the device and in use (1) (2) (5), and the most memory that weights and gradients took.
  The simulator drives this very class.
- ``weights.lent_weights``: what modules have of them (3), and what the host takes back of what they wrote there.
- ``host_source``: the bytes of a layer on the host, updated and cast, as an upload reads them.
- ``step``, ``backward``: from the first fetch to the last; graph tasks, and gradients that arrive in them (7) (8) (9).
  Each part from here on is a ``step.Part``: it has the parts so far, of which there is one record.
- ``saved_tensors``, ``module_calls``, ``access``: the doors by which modules, autograd and user code ask for a layer (4) (6).
- ``updating``: the engine as an optimizer's step sees it. ``layerwise`` takes such a step apart by layers, and ``clipping``
  measures norms while backward goes on, and leaves the multiplication to the updates.
- ``turns``: which process may change the weights, and when. ``placement`` makes the parts that differ with the place of the
  weights and with the number of devices.
- ``assembly``, ``streamer``: build the parts, and hand every call to one of them. A call of Lightning comes from
  ``trainer.loops``.

What comes in: a module, its layers (``model``), a plan, a device; then the calls of ``trainer``. What goes out: the module
with the host's parameters after every step, gradients in ``param.grad``, counters. It may import every wing below it
(``optim``, ``weights``, ``kernels``, ``activations``, ``store``, ``observe``, ``plan``, ``model``, ``device``), never Lightning.

Lower wings call back only in two ways: ``weights`` (device parameters, tables, gradients) through the protocol
:class:`~sp_lightning.layers.parameter_group.EngineCallbacks`, which ``access.Access`` implements, and a recomputed unit of
``activations`` through ``Access.rerun``. The rule throughout: a wrong guess costs an upload, never a result.
"""
