"""Runs optimizer steps on the GPU, layer by layer, and keeps layers there with their optimizer state.

Options: ``optimizer_on="gpu"``, ``gpu_layers=``. ``alone`` decides which optimizers can step on the GPU. The folder implements
one interface, which ``registry`` resolves: :class:`~sp_lightning.core.updates.layer_stepper.LayerStepper` steps layers.

- ``on_device`` uploads a layer's weights, gradients and state (``state_exchange``, ``host_state``) into ``step_slots``, steps
  copies of its parameters there (``twins``), and downloads the result.
- ``staying`` keeps layers and their state on the GPU between steps. Meanwhile the layers' host parameters have the class of
  ``away``.

If these options are not used, the engine has the default stepper, whose methods do nothing. Without the folder,
``optimizer_on="gpu"`` and a number of ``gpu_layers`` are errors, and with ``gpu_layers="auto"`` no layer stays.
"""
