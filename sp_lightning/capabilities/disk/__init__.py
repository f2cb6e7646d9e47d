"""Keeps optimizer state, trained weights and gradients on a disk, and reads other weights in place from the user's files.

Options: ``disk=``, ``host_memory=``. The folder implements three interfaces of the core:

- ``Placement`` (``engine.placement``): weights in the user's files, weights and gradients in scratch files (``placements``).
  ``tier.place`` chooses one when a run is set up.
- ``StateStore`` (``engine.state_store``): optimizer state in a scratch file (``tier``, ``state_on_disk``), opened when training
  begins. Its tensors may outlive the run: the mapping exists as long as they do.
- ``HostBudget`` (``trainer.host_memory``): ``host_memory=`` without a disk (``host_budget``).

The other files: ``state_placement`` decides what is on the disk. ``scratch_file`` has temporary files without names;
``mapped_file`` maps memory from one, reads the next layer ahead, and writes the layers before. ``away`` has mapped tensors in
forked processes and in checkpoints. ``weights_in_files`` finds weights in the user's files and reads them; ``file_source`` stages
them for uploads.

A run without these options does not import the folder. The core then calls one method of the default ``StateStore`` at each
optimizer step, and two at each update of a layer.
"""
