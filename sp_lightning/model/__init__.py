"""Finds the layers of a module: what is uploaded together, what stays on the device, and where each parameter is.

- ``find`` takes a module and the user's choices, and returns a :class:`~sp_lightning.model.found.Found`. It does not change
  the module and copies nothing.
- ``blocks`` recognises repeated blocks and lists of experts; ``patterns`` resolves ``layers=`` and ``keep_on_gpu=``;
  ``checks`` raises errors for what is not supported and writes the notes of the plan.
- ``rows`` is the interface of layers of which single rows are uploaded. The capability ``experts`` implements it.
- ``wrapped`` takes tensor subclasses apart into plain tensors and rebuilds them. ``without_values`` gives values to tensors
  on the meta device.

Files here may import ``device`` and ``torch_compat``.
"""
