"""Weights: the layers that travel, the slots they travel to, and what stands for their weights in modules.

:class:`~sp_lightning.layers.layer.StreamedLayer` is what travels together. ``slots`` has the device memory, which is filled
from a :class:`~sp_lightning.layers.slots.BlockSource`; ``prefetch`` says what comes next. ``uploads`` copies layers.
``parameter_group`` and ``device_parameter`` are what modules hold in a step, ``swap`` puts
them there, with the ``buffers`` that have to be beside them; ``writes`` finds by digests what was written where no version
shows it. ``lent_weights`` gives modules the weights of layers in use, and takes back what they wrote there. ``residents`` stay
on the device. ``casts`` travel in place of float32 weights, made of them in ``host_casts``. A layer is uploaded whole,
unless a :class:`~sp_lightning.model.rows.RowFinder` has given it other rows. ``gradients`` go back to the host,
where a ``narrow_gradient`` keeps the dtype in which it came until user code asks for it. ``gradient_sink`` is what the engine
knows of that, and has the transfers.

Host blocks (``store``) and a plan come in. Device parameters for modules and gradients in ``param.grad`` go out. The wing may
import ``store``, ``observe``, ``plan``, ``model`` and ``device``. It knows neither steps nor backwards: what it needs of them
it asks for through the protocol ``EngineCallbacks`` and the base ``BlockSource``.
"""
