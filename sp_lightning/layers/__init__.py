"""Layers: the state of each layer, the slots that layers are fetched into, and the device parameters that modules hold.

- ``states``: the six states of a layer, and the table of transitions. Its diagram is in :mod:`sp_lightning.engine`.
- ``layer``: :class:`~sp_lightning.layers.layer.StreamedLayer`, all data of the engine about one layer, and ``Slot``.
- ``ring``: the device memory, and the transfers into it from a :class:`~sp_lightning.layers.ring.BlockSource`.
- ``parameter_group``, ``device_parameter``: the device parameters, which modules hold in a step. ``swap`` puts them into the
  modules. ``buffers`` copies averages and masks of weights to the device and back. ``bound_weights`` makes device parameters
  views of slots, or stand-ins. ``roles``: classes that host parameters have for some time. Code that uses a host parameter runs
  the code of its role first.
- ``write_guard``: records that user code may write weights without a change of a version counter. ``write_back`` copies written
  weights to the host. ``writes`` compares digests of values, to detect such writes.
- ``residents``: the weights outside all layers, which are on the device during a step.
- ``casts``, ``host_casts``: 16-bit copies that are uploaded in place of float32 weights. ``compiled_calls`` gives them to modules
  that ``torch.compile`` compiles.
- ``gradients``: from autograd to ``param.grad`` on the host. ``gradient_sink`` has the transfers. A ``narrow_gradient`` keeps the
  dtype of backward until user code reads it. Reading a ``freed_gradient`` is an error.

By default a layer is uploaded whole. If a :class:`~sp_lightning.model.rows.RowFinder` has replaced the layer's ``rows``, single
rows may be uploaded.

This package gets host blocks (``store``) and a plan. It may import ``store``, ``observe``, ``plan``, ``model``, ``device``
and ``torch_compat``. It imports nothing of the engine, and calls the engine only through the protocol ``EngineCallbacks`` and
the base class ``BlockSource``.
"""
