"""The streams in whose order things happen, and the waits that the engine puts between them."""

from __future__ import annotations

import enum


class Stream(enum.Enum):
    """The order in which an operation takes its place."""

    COMPUTE = "compute"
    """The stream of the model's kernels, which is the stream that is current when the operation is issued."""
    UPLOAD = "host to device"
    DOWNLOAD = "device to host"
    REDUCE = "between devices"
    """The stream on which ranks sum their gradients."""
    UPDATE = "host, in the background"
    """The order of the background thread, which updates weights while the host goes on. The device has no such stream."""


class Wait(enum.Enum):
    """Every wait of the engine. The value of a member says what is true because of the wait.

    ``tests/device/test_waits.py`` leaves out one wait at a time and shows that a run then reads or writes too early.
    """

    # That of Enum runs in Python (3.11), and seconds are counted by wait with every copy.
    __hash__ = object.__hash__

    FETCH_AFTER_USE = "a slot is overwritten after the last kernel that read it"
    USE_AFTER_FETCH = "a layer is read after its transfer"
    BRING_AFTER_FETCH = "experts that were kept are copied into a slot after the transfer that came there before"
    CAST_AFTER_FETCH = "casts are made anew after the last transfer that read them"
    WRITE_BACK_AFTER_USE = "the host takes a weight after the kernels that wrote it on the device"
    RESIDENTS_AFTER_USE = "residents are sent again after the last kernel that read them"
    USE_AFTER_RESIDENTS = "residents are read after their transfer"
    DRAIN_AFTER_GRADIENT = "a gradient leaves after the kernel that wrote it"
    REDUCE_AFTER_GRADIENT = "a gradient is sent to other ranks after the kernel that wrote it"
    DRAIN_AFTER_REDUCE = "a rank's part of a sum leaves after the kernels that added it up"
    SHOW_AFTER_LANDING = "gradients are shown after the parts of all ranks are there"
    STEP_AFTER_ARRIVAL = "the primary writes weights and gradients after all ranks have come to its turn"
    USE_AFTER_TURN = "the other ranks go on after the primary's turn"
    READ_AFTER_SHARED_UPDATE = "the other ranks read a layer after the primary's update in the background"
    UPDATE_AFTER_LANDING = "the primary updates a layer in backward after the parts of all ranks are there"
    READ_AFTER_FILL = "weights are read after the primary has filled the memory of all ranks"
    REUSE_AFTER_DRAIN = "a gradient's device memory is used again after its copy"
    APPLY_AFTER_DRAIN = "the host reads a gradient after its copy"
    DROP_AFTER_DRAIN = "the host uses a dropped gradient's memory again after its copy"
    UPDATE_AFTER_FETCH = "the host writes weights after the transfers that read them"
    UPDATE_AFTER_RESIDENTS = "the host writes residents after the transfer that reads them"
    FETCH_AFTER_UPDATE = "a layer is fetched after its update in the background"
    READ_AFTER_UPDATE = "the host reads and writes weights and gradients after their updates in the background"
    CLOSE_AFTER_FETCH = "slots and host blocks are freed after the last transfer"
    STORE_AFTER_SAVE = "an activation leaves after the kernel that wrote it"
    REUSE_AFTER_STORE = "an activation's device memory is used again after its copy to the host"
    GATHER_AFTER_SEND = "the host gathers rows of a table after the transfer of those before"
    RETURN_AFTER_USE = "an activation comes back into memory after the last kernel that used that before"
    USE_AFTER_RETURN = "a returned activation is read after its transfer"
    REUSE_AFTER_RETURN = "memory of a returned activation that nobody read is used again after the transfer"
    CLOSE_AFTER_STORE = "the host's memory of activations is freed after the last transfer from or to it"
    UNPIN_AFTER_COPY = "host memory is unpinned after the last copy from or to it"
