"""The engine: it streams the layers of one module while steps run. **Start reading here.**

**These lines suffice to change a fetch or a step.** A layer's weights are in CPU memory, in one buffer. The GPU has *slots*, each
with memory for one layer. In a step:

1. A module is called. ``uses`` asks ``schedule.Residency.require`` for its layers. A layer that is in no slot is uploaded
   (``Residency._fetch``), and the layers that the last batch used next are uploaded ahead (``schedule.Prefetch``).
2. ``weights.bound_weights`` makes the module's parameters views of the slot. The forward runs.
3. The call returns. Weights that were written are copied back, and the slot may be overwritten.
4. In backward, autograd asks ``saved_tensors`` for each saved weight: 1 again. ``backward`` takes each gradient, and
   ``weights.gradients`` copies the gradients of a layer to CPU memory, as ``param.grad``.
5. ``step`` gives the module its own parameters again, and the optimizer steps them (``updates.updating``).

Streams wait for events, and each wait has a name (``device.Wait``). A wrong guess of the prefetch costs an upload, never a
result. All that follows is for reference.

**Words.** One meaning each, in code, messages and guides:

================  =====================================================================================================
layer             the weights that move together: a *block* (a repeated module), an embedding, a head
slot, ring        GPU memory for one layer, which is reused and never freed during a run; all slots of one size
window, k, k'     k layers are usable on the GPU at once, k' more may be uploaded meanwhile: k + k' slots
host store        the weights in CPU memory, one flat buffer per layer, pinned (page-locked) for asynchronous copies
upload, download  a copy from CPU to GPU memory, and back
offload           keep in CPU memory, or copy there: weights, gradients, optimizer state, activations
fetch, prefetch   upload a layer to a slot; the same before the layer is needed
evict             drop a layer from its slot, so that another layer can be uploaded there
in flight         said of a copy that has begun and has not ended
stall             time in which compute waits for a copy or an optimizer step
master, cast      a float32 weight in the host store, and its 16-bit copy that is uploaded in its place
owner             the layer that masters belong to. It is updated together with them. Each other layer is its own owner
resident          a weight outside all layers, which is on the GPU during a step
host parameter    the user's Parameter, a view of the host store
device parameter  the Parameter that modules hold in its place while a step runs
stand-in          a device parameter without memory, because its layer is not attached; any use of it fetches the layer
role              a class that a host parameter has for some time: code that uses the parameter runs it first
narrow gradient   a gradient that keeps the 16-bit dtype of backward until user code reads ``param.grad``
update            the optimizer's step of one layer, perhaps in a background thread
stays on the GPU  said of a layer (``gpu_layers``) that is an ordinary module there, with gradients and optimizer state.
                  Its parameters are in no ``StreamedLayer``
expert            a layer inside a block that is uploaded only if a batch is routed to it
rank              one of several processes that train together
trace             the recorded order of layer calls, which drives prefetching
plan              the decisions before a run: layers, window, memory, frozen
================  =====================================================================================================

**Who decides what.**

- The engine decides *when* a layer is copied, and to which free slot. It follows the *trace*: the order in which the last batch
  used the layers, in forward and backward (``schedule.Trace``). The first batch uses the plan's order, reversed for
  backward.
- A frozen :class:`~sp_lightning.core.plan.plan.Plan` decides *what* is copied, and which ring of slots a layer uses. A
  ``plan.window.Window`` makes the first one, and ``capabilities.tuning`` changes k between batches.
- :func:`sp_lightning.core.plan.update_policy.decide` decides *when* optimizers step.
- The option ``optimizer_on`` decides *where* they step. ``Window`` raises an error if the GPU has no room for steps, and
  ``decide`` if it cannot step these optimizers.

- An automatic choice that fails does not end a run: the log has one line, and the next mode with the same results follows. A
  table in ``examples/guide/limits.md`` has each case. ``tests/endurance/test_automatic_choices.py`` tests it.

**One layer, forward and backward.** Each number stands as a comment beside the code line that does it::

    host block ──fetch──▶ slot ──lock──▶ device parameters ──▶ forward ──release──▶ slot may be overwritten
                  (1)           (2)             (3)               (4)         (5)
    param.grad ◀──apply── host memory ◀──offload── gradient ◀── backward ◀──view── unpack ◀── fetched again (1) (2)
                  (9)                     (8)                     (7)                (6)

==  =========================  =======================================================================================
    where                      what happens
==  =========================  =======================================================================================
1   Residency._fetch           Copies layers to slots, in one transfer. If the prefetch guessed right, it copies a layer before
                               the layer is used.
2   Residency.require          Locks a layer's slot. The compute stream waits for the transfer (``USE_AFTER_FETCH``). The host
                               does not wait for it.
3   BoundWeights.attach        Makes the device parameters, which modules hold, views of the slot.
4   Calls.leave                Ends the use of the layers, because the module call has returned.
5   BoundWeights.release       First copies weights that were written on the device to the host. Then makes the device parameters
                               stand-ins again, and records when the slot may be overwritten.
6   SavedTensors._bring        Returns a view of the layer's slot, because autograd unpacks a saved weight. If necessary, the
                               layer is fetched first.
7   Backward.gradient_arrived  Takes a gradient from the device parameter.
8   Transfers.send             Copies the gradients of a layer to host memory, in one transfer.
9   Gradients._apply_one       Makes each gradient ``param.grad`` of its host parameter, or adds it to ``param.grad``.
==  =========================  =======================================================================================

**States.** A layer always has memory on the host. Its :class:`~sp_lightning.core.weights.states.LayerState` tells which copy
exists on the device, and who may use the copy. ``tests/support/states.py`` has this diagram as a table, with the methods that
make each transition::

        ┌──────────────────────────── release, if it has left its slot ──────────────────────────────────┐
        ▼                                                                                                │
    ┌────────┐  fetch   ┌─────────┐  lock   ┌──────────┐  attach   ┌────────┐  rest    ┌─────────┐       │
    │  HOST  │ ───────▶ │ FETCHED │ ──────▶ │ UNPACKED │ ────────▶ │ IN_USE │ ───────▶ │ RESTING │       │
    └────────┘ ◀─────── └─────────┘         └──────────┘           └────────┘ ◀─────── └─────────┘       │
        ▲       evict     ▲     ▲                │                     │       attach       │            │
        │                 │     └─── release ────┴─────────────────────┴────────────────────┴────────────┘
        │ evict           │ fetch (new values), drop views             │
        │                 │                                            │ release, if a tensor
        │            ┌────────┐                                        │ still views the slot
        └─────────── │ VIEWED │ ◀──────────────────────────────────────┘
                     └────────┘ ──▶ UNPACKED, by lock

- *lock* and *release* surround each use of a layer. Between the two, no other layer may overwrite the slot.
- Layers are RESTING only in inference, if every layer of their ring has a slot. Then nothing is copied any more.
- A released layer keeps its slot. It is *evicted* when another layer is fetched into the slot, when its copy is out of date, or
  when slots are freed. Masters and tables are evicted at each release, except if a tensor still views their slot.
- ``Prefetch._choose`` chooses the slot for a prefetch, ``Slots.find`` for a fetch on demand: an empty slot, else the slot whose
  layer is used again last. The host never waits for a slot: the upload stream does, and if all slots are in use, a fetch on
  demand allocates another one.
- VIEWED protects views that user code or a graph keeps after the use. Overwriting the slot would change the views.

**The parts.** ``engine.Engine.__init__`` makes one of each, and each gets the engine as its only argument. It finds the other
parts there: ``engine.residency``, ``engine.step``. When a part is made, it may use those that were made before it; in a step,
all. A module imports only modules of the engine that are above it in this list (``Engine`` itself only for annotations), and the
interfaces of capabilities (``activations``, ``owners``, ``updates.state_store``):

=======================  ============================================================================================
``schedule``             Which layers are fetched, locked, attached and released (1) (2), and in which order. The planner's
                         simulator (``tools.planner.prediction``) runs these very classes on clocks.
``weights.bound_weights`` Binds device parameters to slots: makes them views of a slot, and stand-ins again (3) (5).
``weights.compiled_calls`` Gives modules that ``torch.compile`` compiles casts and whole wrapped weights during their calls.
``weights.writes``        Copies weights to the host that user code has written on the device.
``host_source``          A layer's bytes on the host, updated and cast, before a transfer reads them.
``step``                 A step, from its first fetch until modules hold the host's parameters again.
``placement``            Makes the parts that differ with several devices or a disk.
``saved_objects``        Gives the backward of a custom ``torch.autograd.Function`` the parameters and tensors that it saved.
``saved_tensors``        Packs each weight that autograd saves: the graph holds the weight's place in a slot. Unpacks it (6).
``backward``             Autograd's graph tasks, and the gradients that arrive in them (7) (8) (9).
``uses``                 A layer is needed: a module is called, and its layers are locked and attached before and released
                         after (4); a weight is used outside of module calls; rows are looked up.
``updates.updating``     The engine as an optimizer's step sees it. ``updates.layerwise`` divides such a step into updates of
                         layers; ``updates.clipping`` measures gradient norms during backward.
``engine``               Makes the parts, and takes the calls of ``trainer``.
=======================  ============================================================================================

**Where to change what**, if the name of the file does not say it:

==========================================================  =====================================================
which slot a prefetch takes; a fetch on demand              ``schedule.Prefetch._choose``; ``weights.ring.Slots.find``
when a written weight is copied back; what is compared      ``weights.bound_weights`` (``_detach``); ``weights.writes``
how gradients are followed; how they leave                  ``backward``; ``weights.gradients``
when backward updates a layer                               ``updates.layerwise._update_early``
what ``ctx.saved_tensors`` returns                          ``saved_objects``
errors of code in other threads                             ``device.own_threads`` (text), ``uses``, ``weights.swap``
how the host waits for an event                             ``device.accelerator.Accelerator.synchronize``
the streams and order of uploads; of gradients              ``weights.ring.Slots`` (``fetch``, ``_send``);
                                                            ``weights.gradients`` (``Gradients.drain``, ``Transfers``)
a check at each call of a layer                             ``uses.ModuleCall._begin``, ``uses.Calls.enter``
what happens when values are loaded between two steps       ``trainer.run.Run.loading``, ``step.Step.invalidate``
what happens after an error in a step                       ``trainer.run.Run.whole_after_failure``, ``step.Step.end``
the time that the simulator counts for a wait or a copy     ``tools.planner.prediction.clocks``
the dtype of casts; how they are computed                   ``plan.plan``, ``weights.casts``; ``weights.host_casts``
an option: field, check, signature; where memory acts       ``trainer.options``, ``trainer.option_checks``,
                                                            ``trainer.strategy``; ``plan.window``
==========================================================  =====================================================

**Words in the names of functions and attributes**, here and in the other folders:

===================  ==================================================================================================
``refuse_…``         raises an error if the case is not supported; otherwise does nothing
``against_…``        returns the reason against something as text; an empty text if nothing is against it
``write_back…``      copies weights that user code has written on the device to the host
``visits``           the layers that a call of a module uses; of a layer: how often it was used
``views``, *viewed*  tensors of user code or a graph over a slot's memory. As long as such a tensor exists, the slot is not
                     given to another layer
*held*               an object (a device parameter, a state) is still referenced by user code or a graph
*noticed*            of a use of a weight: the parameter's class runs before the operation (``__torch_function__``)
*exposed*            of a weight: user code has its ``.data`` in this use of the layer, and no version counter shows a write
``stale``            of a layer: version counters show a write on the host since the fetch. Of a slot: host weights of its layer
                     were written, or may have been, since the fetch. Tensors view the slot, so the next fetch of the layer
                     fills the same slot again
*early*              of an update: in backward, before the optimizer's step
===================  ==================================================================================================

**Calls into the engine.** ``trainer`` calls ``engine.Engine``. The package ``layers`` calls the engine in two ways only:

- device parameters call methods of :class:`~sp_lightning.core.engine.uses.Uses`, which is their ``ParameterGroup.engine``;
- residents, which need their bytes on the host, through :class:`~sp_lightning.core.weights.ring.BlockSource`, which
  ``HostSource`` implements.

The capability ``activations`` gets the engine. A forward that runs again in backward is a call of its module
(``ModuleCall.again``). The engine imports nothing of Lightning.

**Waits.** Every wait of a stream or of the host has a name in :class:`~sp_lightning.core.device.device.Wait`. The value of
the name says what the wait guarantees. ``tests/device/test_waits.py`` leaves out each wait and shows that a run then fails.
Three waits of the diagram:

- ``FETCH_AFTER_USE``: the upload stream waits for ``slot.idle``, the event after the last kernel that read the slot, before (1).
- ``USE_AFTER_FETCH``: compute waits for ``slot.filled``, the event after the transfer, in (2). This is the stall that k hides.
- ``UPDATE_AFTER_FETCH``: before any code writes host weights, the host waits for the last transfer that reads them
  (``layer.transfer``). Three methods of the core wait:

  - ``HostSource.synchronize``: before optimizer steps, and before user code that may write weights.
  - ``Updating.before_early_update``: before an update in backward.
  - ``Uses.host_is_used``: before user code uses a captured host parameter in a step.

**Threads.** The engine's lock (``Engine.lock``) guards the engine's data. It is not held while user code runs.

====================  ===============================================================================================
thread                runs
====================  ===============================================================================================
main thread           begins and ends steps; module calls, fetches, user code, optimizer steps that do not overlap
autograd's threads    backward: hooks, (6) to (9), recomputed forwards. On the CPU this is the thread that calls backward
background thread     updates of layers, norms of gradients (``Device.later``), one piece of work at a time
foreign threads       other threads of user code: "Note: threads of a run" in ``device/own_threads.py``
====================  ===============================================================================================

**Modules hold host parameters**

- between steps;
- while an optimizer steps inside a step (``Step.hold_host``);
- after each backward of manual optimization (``Step.pause``);
- between forward and backward if a hook may read weights (``Step.await_backward``);
- while a checkpoint is saved (``Step.show_host``).

In the rest of a step they hold device parameters. A foreign thread finds host parameters at any time.

**Who may write weights, and when.**

- Between steps, user code and optimizers write host parameters. ``Step.end`` has released all layers except resting ones. In
  training, it has marked all copies as out of date. After a step without backward, host parameters keep a role if user code
  follows (``ParameterSwap.watch_between``), and only layers whose weights this code has used, or whose memory it holds, are
  uploaded again. An address that is kept as a number (``data_ptr()``) is not noticed.
- In a step, user code writes device parameters. Version counters show such writes, and (5) copies the weights back to the host.
- In a step, user code may also have captured host parameters, for example in a list. They have a role then
  (``_HostParameterInStep`` in ``weights/swap.py``), which notices operations on them, and version counters show writes to them.
  Later fetches have the new values. If a weight was written on the host and on the device, (5) raises a ``RuntimeError``. So
  does a write on the host, or an optimizer's step, inside a call of the weight's layer (``Residency.renew``).
- What user code takes from a weight in a step (``.data``, a view) is for that step. After a read of ``.data``, the weight is
  compared with the host's at the layer's release. ``param.data = other`` copies ``other``, and is a write in place. The rules are
  in :mod:`~sp_lightning.core.weights.writes`.
- The background thread writes host parameters while it runs an update. ``layer.update`` is set then, and a fetch of the layer
  waits for the update (``FETCH_AFTER_UPDATE``).
- With ``optimizer_overlap="backward"``, an update in backward writes host weights and optimizer state of a layer whose gradients
  are complete, and whose calls need no more weights (``Backward.complete``, ``Updating.before_early_update``). It never writes a
  slot that backward may read. A later use of the layer in the same backward raises a ``RuntimeError``.
- Parameters that stay on the GPU (``Found.on_gpu``) are ordinary parameters there. No layer has them, and the engine never writes
  them: autograd gives them their gradients, and the optimizer steps them in the user's thread.

**Errors.** After an error every layer is in one of the six states, because each transition is completed or undone:

- User code raises in forward: each module call still ends (``calls.ModuleCall``).

  - If the step itself catches the error, the step continues. The next module call releases the layers of the failed call.
  - Otherwise ``trainer`` calls ``Engine.abort``, which releases all layers, drops gradients in flight and marks all copies as
    out of date.

- User code raises in backward: autograd ends its graph tasks, and ``Backward.failed`` ends the engine's record of them. Gradients
  that had arrived before are in ``param.grad``, as in plain PyTorch.
- A transfer cannot be issued (out of memory, for example): its layers are HOST again. A layer whose slot is locked or
  viewed keeps the slot, and its next use fetches it again.
- An update raises in the background: later updates are skipped. The next wait that may raise (the table in
  ``updates/background.py``) raises that error, with a note that names the layer. Later ones raise it again, because only some
  layers have the new weights.
- The host and the device have written the same weight: copying it back raises a ``RuntimeError``. The layer is released anyway.
"""
