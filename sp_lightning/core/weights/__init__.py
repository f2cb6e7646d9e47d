"""Weights: the state of each layer, the slots that layers are fetched into, and the device parameters that modules hold.

- ``states``: the six states of a layer, and the table of transitions. Its diagram is in :mod:`sp_lightning.core.engine`.
- ``layer``: :class:`~sp_lightning.core.weights.layer.StreamedLayer`, all data of the engine about one layer, and ``Slot``.
- ``ring``: the device memory, and the transfers into it from a :class:`~sp_lightning.core.weights.ring.BlockSource`.
- ``parameter_group``, ``device_parameter``: the device parameters, which modules hold in a step. ``swap`` puts them into the
  modules. ``buffers`` copies averages and masks of weights to the device and back. ``bound_weights`` makes device parameters
  views of slots, or stand-ins. ``roles``: classes that host parameters have for some time. Code that uses a host parameter runs
  the code of its role first.
- ``writes``: copies weights that user code has written to the host, and values that it gives to weights, in four rules.
- ``residents``: the weights outside all layers, which are on the device during a step.
- ``casts``, ``host_casts``: 16-bit copies that are uploaded in place of float32 weights. ``compiled_calls`` gives them to modules
  that ``torch.compile`` compiles.
- ``gradients``: from autograd to ``param.grad`` on the host, with the transfers. ``gradient_roles``: a gradient keeps the dtype
  of backward until user code reads it, was freed (reading it is an error), or is in another process.

By default a layer is uploaded whole. If a :class:`~sp_lightning.core.model.rows.RowFinder` has replaced the layer's ``rows``,
single rows may be uploaded.

This package gets host blocks (``store``) and a plan. It may import ``store``, ``plan``, ``model``, ``device`` and
``torch_compat``. It imports nothing of the engine, and calls the engine only as ``ParameterGroup.engine``, which is ``Uses``,
and through the base class ``BlockSource``.
"""
