"""Activation offloading and activation checkpointing, for each layer.

**What it adds.** ``activations="recompute"``, ``"offload"``, modes by patterns, and ``"auto"``. ``policy`` gives each unit its
mode and counts the memory that modes take. ``calls`` runs each call of a unit in its mode: ``recompute`` puts torch's checkpoint
around the forward; ``offload`` copies activations to the host (``host_ring``) and back. ``headroom`` offloads the oldest
activations before device memory ends, with ``"auto"``.

**Where it enters.** :func:`~sp_lightning.registry.activations` returns the plan of ``calls.plan_activations``. It replaces the
engine's :class:`~sp_lightning.core.engine.activations.KeepAll` by ``calls.UnitModes``.

**What it costs if unused.** Nothing: the engine has ``KeepAll`` if all units keep their activations and ``"auto"`` never
offloads, because the run does not train or device memory is not limited.

**Without this folder** ``"recompute"``, ``"offload"`` and patterns raise an *error*. ``"auto"`` keeps all activations, and logs
one line if device memory ends (*fallback*).
"""
