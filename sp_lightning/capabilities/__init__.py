"""Capabilities: folders without which the core works. Each enters by ``sp_lightning.registry`` when an option needs it.

- ``activations``: offloads or recomputes activations.
- ``disk``: keeps optimizer state, weights and gradients on a disk.
- ``experts``: uploads only the experts and embedding rows that a batch uses; packs experts in four bits.
- ``gpu_steps``: runs optimizer steps on the GPU.
- ``tuning``: measures batches, chooses k, and has activations offloaded if not all fit.

A capability may import the core and ``trainer``. Only ``tuning`` may import another one, which offloads activations for
it. The page of each says what it adds, where it enters, and what it costs if it is not used. ``tests/repository/deletion.py``
removes each, and tests the rest.
"""
