"""The engine: it streams the layers of one module while steps run. **Start reading here.**

The glossary in ``CONTRIBUTING.md`` explains the words: *layer*, *slot*, *prefetch window*, *master weight and cast*, *trace*.
The engine decides *when* a layer is copied. A frozen :class:`~sp_lightning.plan.plan.Plan` decides *what* and *where*.

**One layer, forward and backward.** Each number stands as a comment beside the code line that does it::

    host block ──fetch──▶ slot ──lock──▶ device parameters ──▶ forward ──release──▶ slot may be overwritten
                  (1)           (2)             (3)               (4)         (5)
    param.grad ◀──apply── host memory ◀──offload── gradient ◀── backward ◀──view── unpack ◀── fetched again (1) (2)
                  (9)                     (8)                     (7)                (6)

==  =========================  =======================================================================================
    where                      what happens
==  =========================  =======================================================================================
1   Residency._fetch           Copies layers to slots, in one transfer. Ahead of their use if the prefetch has guessed well.
2   Residency.require          Locks a layer's slot. Compute waits for the transfer (``USE_AFTER_FETCH``).
3   BoundWeights.move_in       Makes the device parameters, which modules hold, views of the slot.
4   Access.leave               The module call has returned.
5   BoundWeights.release       Makes the device parameters stand-ins again, and records when the slot may be overwritten.
6   SavedTensors._bring        Autograd unpacks a saved weight: a view of the layer's slot, which is fetched for it if necessary.
7   Backward.gradient_arrived  Takes a gradient from the device parameter.
8   GradientSink.send          Copies the gradients of a layer to host memory, in one transfer.
9   Gradients._land            Adds them to ``param.grad`` of the user's parameters, which are on the host.
==  =========================  =======================================================================================

**States.** The weights of a layer are always on the host. What exists beside them is the layer's
:class:`~sp_lightning.layers.states.LayerState`; ``layers/states.py`` has this diagram as a table, with the methods that make each
transition, and every test checks it::

        ┌──────────────────────────── release, if the copy is out of date ───────────────────────────────┐
        ▼                                                                                                │
    ┌────────┐  fetch   ┌─────────┐  lock   ┌──────────┐  attach   ┌────────┐  rest    ┌─────────┐       │
    │  HOST  │ ───────▶ │ FETCHED │ ──────▶ │ UNPACKED │ ────────▶ │ IN_USE │ ───────▶ │ RESTING │       │
    └────────┘ ◀─────── └─────────┘         └──────────┘           └────────┘ ◀─────── └─────────┘       │
        ▲       evict     ▲     ▲                │                     │       attach       │            │
        │                 │     └─── release ────┴─────────────────────┴────────────────────┴────────────┘
        │ evict           │ fetch (new values), drop views             │
        │                 │                                            │ release, if a tensor
        │            ┌────────┐                                        │ still views the slot
        └─────────── │  HELD  │ ◀──────────────────────────────────────┘
                     └────────┘ ──▶ UNPACKED, by lock

- *lock* and *release* surround each use: no other layer may overwrite the slot in between.
- Layers are RESTING only in inference, if every layer has a slot of its own. Then nothing is copied at all.
- HELD protects views that user code or a graph keeps after the use. Overwriting the slot would change them.

**The parts**, from below. Each imports only parts above it in this list:

=======================  ============================================================================================
``residency``            The schedule: which layers are fetched, locked, attached and released (1) (2). The planner's simulator
                         runs this very class with a device of clocks.
``layers.lent_weights``  What modules hold: gives them the slot's memory, and takes it from them (3) (5).
``layers.write_back``    Copies to the host what user code has written to weights on the device.
``host_source``          A layer's bytes on the host, updated and cast, before a transfer reads them.
``step``                 A step, from its first fetch until modules hold the host's parameters again.
``backward``             Autograd's graph tasks, and the gradients that arrive in them (7) (8) (9).
``saved_tensors``        Packs weights that autograd saves as places in a slot, and unpacks them (6).
``module_calls``         Calls :class:`~sp_lightning.engine.access.Access` before and after each module call.
``access``               All requests for a layer: a module call (4), a use of a weight elsewhere, a look-up of rows.
``updating``             What an optimizer's step needs of the engine. ``layerwise`` divides such a step into updates of
                         layers; ``clipping`` measures gradient norms during backward.
``placement``            Chooses the parts that differ with several devices or a disk.
``assembly``, ``streamer``  Build the parts. :class:`~sp_lightning.engine.streamer.Streamer` passes each call of ``trainer`` to
                         one of them.
=======================  ============================================================================================

Lower packages call the engine in two ways only: device parameters by the protocol
:class:`~sp_lightning.layers.parameter_group.EngineCallbacks`, which ``Access`` implements, and recomputed activations by
``Access.rerun``. The engine imports nothing of Lightning.

**Where things wait.** Every wait of a stream or of the host has a name in :class:`~sp_lightning.device.device.Wait`, whose value
says what is true because of it. ``tests/device/test_waits.py`` leaves out each of them and shows that a run then fails. The
three of the diagram:

- ``FETCH_AFTER_USE``: the upload stream waits for ``slot.idle``, the event after the last kernel that read the slot, before (1).
- ``USE_AFTER_FETCH``: compute waits for ``slot.filled``, the event after the transfer, in (2). This is the stall that k hides.
- ``UPDATE_AFTER_FETCH``: the host waits for ``layer.transfer`` before anything may write the weights that it reads.

The lock of the engine (``Part.lock``) guards its data. It is not held while user code runs.

**Who may write weights, and when.** One Parameter of the user is on the host (*host parameter*); modules hold another one in a
step (*device parameter*).

- Between steps, user code and optimizers write host parameters. ``Step.end`` has released all layers and, in training, marked
  their copies as out of date.
- In a step, user code writes device parameters. Version counters show it, and (5) copies such weights back to the host.
- A write that no version counter shows (through ``.data``, a kept view, ``param.data = other``) needs
  :class:`~sp_lightning.layers.write_guard.WriteGuard`. A layer has one only once user code has touched something in this way.
- The background thread writes host parameters while an update runs. ``layer.update`` is set then, and a fetch of that layer
  waits for it (``FETCH_AFTER_UPDATE``).
- A layer that stays on the GPU (``layer.kept``) is written in its slot, by its optimizer step.

The rule throughout: a wrong guess of the prefetch costs an upload, never a result.

**On an error**, the state of every layer stays one of the six, because each transition is completed or undone:

- User code raises in forward: each module call still ends (``ModuleCalls``). ``Streamer.abort`` then releases all layers, drops
  gradients in flight and marks all copies as out of date. User code may catch the error and continue.
- User code raises in backward: autograd ends its graph tasks, and ``Backward.failed`` ends ours. Gradients that had arrived by
  then are in ``param.grad``, as in plain PyTorch.
- A transfer cannot be issued (out of memory, another rank failed): its layers are HOST again.
- An update raises in the background: the next wait for an update raises that error, with a note that names the layer.
- The host and the device have written the same weight: taking it back raises a ``RuntimeError``. The layer is released anyway.
"""
