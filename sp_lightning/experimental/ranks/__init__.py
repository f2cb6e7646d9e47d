"""Trains on several devices, one process (rank) per device. Without this folder, these options raise an error.

Options: ``Trainer(devices=, num_nodes=)``.

The ranks of a node share one host store. Each rank computes its own batches. Gradients are summed layer by layer, and the
*primary*, rank 0 of a node, runs the optimizers for all ranks of the node. Several nodes are replicas.

Interfaces of the core that this folder implements:

=============================  =====================================  ==================================================
interface of the core          implementation                         purpose
=============================  =====================================  ==================================================
``HostStrategy``               ``strategy.RankStrategy``              a base class of the strategy, before ``DDPStrategy``
``trainer.group.Group``        ``group.RankGroup``                    checks and collectives of a run, and its parts
``trainer.group.WholeSteps``   ``rank_steps.RankSteps``               optimizer steps that are not split by layers
``engine.placement.Placement`` ``placement.RankPlacement``            makes the parts of the engine below
``BlockMemory``                ``block_memory.SharedBlockMemory``     host memory of a layer
``GradientSink``               ``reduced_gradients.ReducedGradients`` gradients, summed over the ranks
``BackgroundUpdates``          ``shared_updates.SharedUpdates``       updates in the background
``HostSource``, ``Turns``      ``turns.SharedSource``, ``RankTurns``  which rank may change the weights, and when
=============================  =====================================  ==================================================

Parts that these implementations use:

- ``ranks`` connects the processes. ``collectives`` calls torch.distributed: barriers that compare the ranks' next operations,
  broadcasts, sums and exchanges. ``failures`` reports errors to all ranks, by the store of torch.distributed.
  ``process_locks`` detects processes that have ended.
- ``rank_sum`` sums one layer's gradients over the ranks, and ``rank_order`` adds the parts in rank order. The sum is copied to
  ``gradient_places``, which are in ``shared_memory``.
- ``agreement`` checks that all ranks have the same model, options, optimizers and numbers of batches.

Why the primary steps all layers of its node: the memory of a node is shared, so one process with all cores updates as fast as
many processes with a part of the cores each. Why nodes are replicas: sending new weights through a network takes longer than
computing them (measured by ``examples/benchmarks/who_updates.py`` of commit eb601d28). So optimizers need no special property,
and one process of each node has the whole optimizer state for checkpoints.

Cost when unused: nothing is imported. A run on one device calls methods of ``Group`` that return at once, once per batch.
"""
