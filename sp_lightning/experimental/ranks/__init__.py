"""Trains on several devices, one process (rank) per device. Without this folder, these options raise an error.

Options: ``Trainer(devices=, num_nodes=)``.

The ranks of a node share one host store. Each rank computes its own batches. Gradients are summed layer by layer on the devices.
Each layer has an *owner* on each node: the rank that downloads the sum, has the optimizer's state, and steps the layer in the
shared memory. Several nodes are replicas.

Interfaces of the core that this folder implements:

=============================  =====================================  ==================================================
interface of the core          implementation                         purpose
=============================  =====================================  ==================================================
``HostStrategy``               ``strategy.RankStrategy``              a base class of the strategy, before ``DDPStrategy``
``trainer.group.Group``        ``ranks.Ranks``                        checks and collectives of a run, and its parts
``trainer.group.OwnedSteps``   ``steps.RankSteps``                    divides optimizers, clips and unscales
``engine.placement.Placement`` ``placement.RankPlacement``            makes the parts of the engine below
``engine.owners.Owners``       ``owners.RankOwners``                  who steps which layer, and when others may read it
``BlockMemory``                ``block_memory.SharedBlockMemory``     host memory of a layer
``Gradients``                  ``gradients.SummedGradients``          gradients, summed over the ranks
``BackgroundUpdates``          ``updates.OwnerUpdates``               updates in the background
``HostSource``                 ``owners.SharedSource``                bytes of layers, with private writes
=============================  =====================================  ==================================================

Parts that these implementations use:

- ``collectives`` calls torch.distributed: barriers that compare the ranks' next operations and a digest, broadcasts, sums and
  means. ``rank_order`` adds the parts of a mean in rank order. ``failures`` reports errors to all ranks, by the store of
  torch.distributed.
- ``shared_memory`` has memory of a node, with a private view for user code.
- ``agreement`` checks that all ranks have the same model, options and optimizers.

A step: all ranks meet in a barrier, which also compares what user code has written. Then each owner steps its layers, and sets
their *step numbers* in shared memory. Other ranks wait for a layer's step number before they read the layer.

With ``optimizer_overlap="backward"``, an owner may update a layer before the barrier. Each rank adds to the layer's sum whether
it is against that: if it has written the layer or its code holds the layer's memory, or if its backward may need the layer again.
An owner has the sum only after all ranks have given their parts, so no other wait is needed.

Cost when unused: nothing is imported. A run on one device calls methods of ``Group`` and ``Owners`` that return at once.
"""
