"""Trains on several devices, one process (rank) per device. Without this folder, these options raise an error.

Options: ``Trainer(devices=, num_nodes=)``, ``transfer="sharded"`` and ``"auto"``, ``save_distributed_checkpoint=True``.

The ranks of a node share one host store. Each rank computes its own batches. Gradients are summed layer by layer, and the
*primary*, rank 0 of a node, runs the optimizers for all ranks of the node. Several nodes are replicas.

Where it enters:

=============================  =====================================  ==================================================
interface of the core          here                                   what it replaces
=============================  =====================================  ==================================================
``HostStrategy``               ``strategy.RankStrategy``              a base class of the strategy, before ``DDPStrategy``
``trainer.group.Group``        ``group.RankGroup``                    checks, collectives, the parts of a run
``trainer.group.WholeSteps``   ``rank_steps.RankSteps``               optimizer steps that are not split by layers
``CheckpointFormat``           ``folder_format.FolderFormat``         checkpoints that all ranks write
``engine.placement.Placement`` ``placement.RankPlacement``            makes the parts of the engine below
``BlockMemory``                ``block_memory.SharedBlockMemory``     host memory of a layer
``Uploads``                    ``sliced_uploads.SlicedUploads``       uploads, with ``transfer="sharded"``
``GradientSink``               ``reduced_gradients.ReducedGradients`` gradients, summed over the ranks
``BackgroundUpdates``          ``shared_updates.SharedUpdates``       updates in the background
``HostSource``, ``Turns``      ``turns.SharedSource``, ``RankTurns``  which rank may change the weights, and when
=============================  =====================================  ==================================================

Below these: ``ranks`` connects the processes and waits for them; ``rank_status``, in ``shared_memory``, shows which collective
each rank has reached and whether it has failed; ``collectives`` calls torch.distributed; ``rank_order`` adds gradients in the
order of ranks; ``rank_sum`` sums one layer's into ``gradient_places``; ``gather_log`` orders sharded uploads; ``transfer``
chooses between the two kinds of upload; ``agreement`` checks that all ranks have the same model; ``checkpoint_folder`` writes and
reads checkpoints of torch.distributed.checkpoint.

Cost when unused: nothing is imported. A run on one device calls methods of ``Group`` that return at once, once per batch.
"""
