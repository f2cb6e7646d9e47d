"""Keeps optimizer state, trained weights and gradients on a disk, and reads frozen weights from the user's own files.

Options: ``disk=``, ``host_memory=``, ``load_weights_from=``. ``tier`` decides what is on the disk. ``state_placement`` is the
decision, frozen. ``state_on_disk`` keeps the optimizer's state; ``state_transfers`` reads ahead and writes behind the steps.
``direct_file`` reads and writes past the page cache; ``mapped_file`` is memory that is mapped from a scratch file;
``weights_in_files`` finds weights in the user's files and uploads them from there. ``away`` has the tensors that users find in
place of values that are on the disk.
"""
