"""Keeps optimizer state, trained weights and gradients on a disk, and reads other weights in place from the user's files.

Options: ``disk=``, ``host_memory=``. The folder implements four interfaces of the core:

- ``Placement`` (``engine.placement``): weights in the user's files, weights and gradients in scratch files (``placements``).
  ``tier.place`` chooses one when a run is set up.
- ``StateStore`` (``engine.state_store``): optimizer state (``tier``), opened when training begins.
- ``AbsentTensor`` (``store.absent_tensor``): the tensors of ``optimizer.state`` whose values are on the disk (``away``). They may
  outlive the run: a later run without a disk loads them. A checkpoint copies their values from file to file.
- ``HostBudget`` (``plan.host_memory``): ``host_memory=`` without a disk (``host_budget``).

The other files: ``state_placement`` decides what is on the disk. ``state_on_disk`` reads the state of a layer before its update
and writes it afterwards; ``state_transfers`` prefetches it and writes it in the background. ``direct_file`` reads and writes past
the page cache; ``mapped_file`` maps memory from a scratch file. ``weights_in_files`` finds weights in the user's files and reads
them; ``file_source`` stages them for uploads.

A run without these options does not import the folder. The core then calls one method of the default ``StateStore`` at each
optimizer step, and two at each update of a layer.
"""
