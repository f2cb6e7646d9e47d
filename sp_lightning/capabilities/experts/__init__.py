"""Uploads only the experts and the rows of embeddings that a batch uses.

**What it adds.** Stacked experts (one parameter for all experts of a module, ``stacks``): ``expert_rows`` uploads the experts
that a router has chosen. Embeddings: ``embedding_rows`` uploads the rows that a batch looks up. Experts that are separate modules
are layers of the core. Stacks in 4 bits: ``packed_stacks`` quantises and dequantises, ``mxfp4`` loads them from files; both work
with every strategy.

**Where it enters.** ``pack_experts`` and ``load_mxfp4`` are public functions. There is no option:
:func:`~sp_lightning.core.model.rows.row_finder` returns the
:class:`~sp_lightning.core.model.rows.RowFinder` of ``finder``. The search for layers asks the finder which modules have rows.
When the engine has made the layers of these modules, the finder replaces their
:class:`~sp_lightning.core.weights.layer.AllRows`. Other layers keep ``AllRows``.

**What it costs if unused.** The search for layers inspects each module. Calls cost nothing: the engine tests ``layer.whole``
before it calls methods of a layer's rows.

**Without this folder** all layers are uploaded whole. Results are the same; uploads are larger (*slower*).
"""
