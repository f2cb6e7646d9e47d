"""Layers: the state of each layer, the slots that layers are fetched into, and the device parameters that modules hold.

- ``states``: the six states of a layer, and the table of transitions. Its diagram is in :mod:`sp_lightning.engine`.
- ``layer``: :class:`~sp_lightning.layers.layer.StreamedLayer`, all data of the engine about one layer, and ``Slot``.
- ``slots``: the device memory, and the transfers into it from a :class:`~sp_lightning.layers.slots.BlockSource`. ``prefetch``
  chooses the next transfer, ``uploads`` issues the copies.
- ``parameter_group``, ``device_parameter``: the parameters that modules hold in a step. ``swap`` puts them into the modules, with
  the ``buffers`` that belong to them. ``bound_weights`` makes them views of slots and stand-ins. ``roles``: classes that
  host parameters have for a while, so that code of this package runs when they are used.
- ``write_guard``: records that user code may write weights without a change of a version counter. ``write_back`` copies written
  weights to the host. ``writes`` compares digests.
- ``residents``: the weights outside all layers, which are on the device during a step.
- ``casts``, ``host_casts``: 16-bit copies that are uploaded in place of float32 weights. ``compiled_calls`` gives them to modules
  that ``torch.compile`` compiles.
- ``gradients``: from autograd to ``param.grad`` on the host. ``gradient_sink`` has the transfers. A ``narrow_gradient`` keeps the
  dtype of backward until user code reads it. Reading a ``freed_gradient`` is an error.

A layer is uploaded whole, unless a :class:`~sp_lightning.model.rows.RowFinder` has given it other rows.

This package gets host blocks (``store``) and a plan. It may import ``store``, ``observe``, ``plan``, ``model`` and ``device``. It
knows neither steps nor backward: it calls the engine by the protocol ``EngineCallbacks`` and the base class ``BlockSource``.
"""
