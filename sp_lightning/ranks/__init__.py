"""Trains on several devices, one process per device.

Options: ``devices > 1``, ``num_nodes > 1``, ``transfer="sharded"``, ``save_distributed_checkpoint=True``. ``ranks`` are the
processes of a run: they wait for each other, report on a ``board`` where they are, and have ``shared_memory``. ``collectives``
uses torch.distributed; ``rank_order`` is the order in which gradients are added. ``reduced_gradients`` adds the gradients of
all ranks, each layer by a ``rank_sum``, into ``gradient_places`` of all ranks. ``turns`` lets one rank at a time change the
weights; ``rank_steps`` runs the optimizer once for all ranks. ``agreement`` compares what must be the same on all ranks.
``checkpoint_folder`` is a checkpoint that all ranks write (``folder_writer``), read by ``folder_reader``.
"""
