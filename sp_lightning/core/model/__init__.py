"""Finds the layers of a module: weights that are uploaded together, weights that stay on the device, and each parameter's places.

- ``find`` takes a module and the user's choices, and returns a :class:`~sp_lightning.core.model.found.Found`. It does not change
  the module and copies nothing.
- ``blocks`` recognises repeated blocks and lists of experts. ``patterns`` resolves ``layers=`` and ``keep_on_gpu=``. ``checks``
  raises errors for unsupported modules, and notes what is unusual for the plan.
- ``rows`` is the interface for layers of which single rows are uploaded. The capability ``experts`` implements it.
- ``elsewhere`` finds parameters and buffers of other modules that share memory with weights.
- ``wrapped`` takes tensor subclasses apart into plain tensors and rebuilds them. ``without_values`` gives values to tensors
  on the meta device.

Files in this folder may import ``torch_compat`` and ``device``.
"""
