"""Keeps optimizer state, trained weights and gradients on a disk, and reads frozen weights in place from the user's files.

Options: ``disk=``, ``host_memory=``. It enters at four interfaces of the core:

- ``Placement`` (``engine.placement``): weights in the user's files, weights and gradients in scratch files (``placements``).
  ``tier.place`` chooses one when a run is set up.
- ``StateStore`` (``engine.state_store``): optimizer state (``tier``), opened when training begins.
- ``AbsentTensor`` (``store.absent_tensor``): what users find in place of state that is on the disk (``away``). Such tensors may
  outlive the run: a later run without a disk loads them. A checkpoint copies them from file to file.
- ``HostBudget`` (``plan.host_memory``): ``host_memory=`` without a disk (``host_budget``).

The other files: ``state_placement`` decides what is on the disk. ``state_on_disk`` reads the state of a layer before its update
and writes it afterwards; ``state_transfers`` prefetches it and writes it in the background. ``direct_file`` reads and writes past
the page cache; ``mapped_file`` maps memory from a scratch file. ``weights_in_files`` finds weights in the user's files and reads
them; ``file_source`` stages them for uploads.

Without these options it is not imported. It costs one method call at each step of an optimizer and two at each update of a layer.
"""
