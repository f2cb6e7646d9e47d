"""Runs optimizer steps on the GPU, layer by layer.

Option: ``optimizer_on="gpu"``. ``alone`` decides which optimizers can step on the GPU. The folder implements
one interface, which ``registry`` resolves: :class:`~sp_lightning.core.updates.layer_stepper.LayerStepper` steps layers.

- ``on_device`` uploads a layer's weights, gradients and state (``state_exchange``, ``host_state``) into ``step_slots``, steps
  copies of its parameters there (``twins``), and downloads the result.

If the option is not used, the engine has the default stepper, whose methods do nothing. Without the folder,
``optimizer_on="gpu"`` is an error, and so is ``gpu_layers`` with an optimizer that has trained parameters in both places.
"""
