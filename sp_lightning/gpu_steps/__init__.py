"""Runs optimizer steps on the GPU, layer by layer, and keeps layers there with their optimizer state.

Options: ``optimizer_on="gpu"`` or ``"auto"``, ``gpu_layers=``. ``step_place`` decides where steps run, by their
measured ``times``. ``on_device`` uploads a layer's optimizer state (``host_state``) into ``step_slots``, runs the step and
downloads the result. ``staying`` keeps layers and their state on the GPU between steps. ``twins`` stand for
the user's parameters on the GPU; ``alone`` describes optimizers that need nothing but a parameter, its gradient and its state.
"""
