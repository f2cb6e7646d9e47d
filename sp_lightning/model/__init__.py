"""What a model consists of: layers that move as one, parameters that stay on the device, and where each of them sits.

``find`` takes a module and the user's choices, and returns a :class:`~sp_lightning.model.found.Found`; nothing is moved
and the module is not changed. ``wrapped`` takes tensor subclasses apart into plain tensors and puts them together again.
``without_values`` gives tensors on the meta device values.

This wing may import ``device``.
"""
