"""The log, and notes on errors that other code raises."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from sp_lightning.core.plan.plan import Plan
from sp_lightning.core.plan.units import human_bytes
from sp_lightning.core.plan.window import FREE_THE_GPU

LOG = logging.getLogger("lightning.pytorch.superpipeline")
_SAID: set[str] = set()
"""The lines that this process has logged with :func:`say_once`."""

TRANSFORMS = (
    "torch.func.grad (or vjp, jacrev, hessian) was called inside a step: it does not support saved-tensor hooks, which "
    "streamed layers need. Use torch.autograd.grad(..., create_graph=True), or keep every layer on the GPU: "
    'SuperpipelineStrategy(keep_on_gpu=["**"], activations="keep").'
)

TRACES = (
    "torch.func.linearize (or make_fx) was called inside a step: it traces a function, and a trace cannot contain a weight of a "
    "streamed module. Use torch.func.jvp in place of linearize; trace copy.deepcopy(module), or the module after the run."
)

WAITS_FOR_NODE = (
    "register_multi_grad_hook(…) was called outside of a step for {name!r}, and waits for a node that backward does not reach. "
    'Call it inside the step (in training_step, after the forward), or with mode="any".'
)
"""The error for a hook that torch would never call. ``name`` is the name of a weight."""

HIDDEN_READ = (
    "The memory of the weight {name!r} was read while the weight is not on the GPU. Superpipeline cannot detect reads in a "
    "torch.func transform (vmap, jvp …), a TorchScript function or a C++ extension. Pass weight.clone() instead, or keep the "
    "weight on the GPU: SuperpipelineStrategy(keep_on_gpu=[{name!r}])."
)

KEPT_VIEW = (
    "Superpipeline: code keeps a view of a weight beyond the step in which it was taken (.data, .detach(), weight[0]). The view "
    "shows the weight's new values in the next step, and its layer stays on the GPU. Write through the module, not through the "
    "view: such a write is an error or is lost. Keep the parameter, or view.clone()."
)
KEPT_MEMORY = (
    "Superpipeline: a weight was given memory that other code holds, too (param.data = other). Its values were copied: later "
    "writes to `other` do not change the weight. Write the weight: param.data.copy_(other)."
)

BEING_UPDATED = (
    "A checkpoint was saved in another thread than trainer.fit's while a step updates weights: some weights would be those of "
    "the next step. Save it in a callback, or try again."
)

SWAPPED_IN_STEP = (
    "torch.utils.swap_tensors was called for {what} inside a step, in which the weights of a layer share memory. Exchange the "
    "values: with torch.no_grad(): kept = a.clone(); a.copy_(b); b.copy_(kept). Or call it between two steps "
    "(on_train_batch_end)."
)

SAVED_IN_STEP = (
    "safetensors.torch.save_model was called inside a step, in which the weights of a layer share memory. Call it between two "
    "steps (on_train_batch_end), or save copies of the weights: safetensors.torch.save_file({name: value.clone() for name, "
    "value in self.state_dict().items()}, path)."
)

IN_TWO_PLACES = (
    "gpu_layers keeps {stay} on the GPU between two steps. All other weights are in CPU memory there, and this code joins both. "
    "Leave gpu_layers out, or join them in training_step, where all weights are on the GPU. ModelPruning works with "
    "use_global_unstructured=False."
)
"""The note on an error about tensors on two devices, between two steps. ``stay``: layers, by name."""

ON_THE_HOST = (
    "Superpipeline keeps gradients on the CPU, and weights between two steps. Copy one of the tensors to the other's device: "
    "param.grad.to(param.device) inside training_step, buffer.to(param.device) in a hook between two steps. In backward (a "
    "checkpoint or your own autograd function), take weights from their modules: a list from before the step has the host "
    "weights."
)

LESS_HOST_MEMORY = (
    'Use less: Trainer(precision="bf16-true") (small updates are lost), an optimizer with less state, frozen layers, adapters, '
    'or SuperpipelineStrategy(optimizer_overlap="backward").'
)

_GPU = {
    "too old": "torch {torch} needs a driver for CUDA {cuda}. Update the driver (nvidia-smi names it), or install a torch "
    "for an older CUDA: https://pytorch.org/get-started/previous-versions.",
    "out of memory": f"Other programs hold the GPU's memory. {FREE_THE_GPU}",
    "not compiled with CUDA": "torch {torch} has no CUDA. Install one that has: https://pytorch.org/get-started/locally.",
    "": "Does this list a GPU: nvidia-smi? If it does not, install its driver. In a container, start it with --gpus all. Is "
    "CUDA_VISIBLE_DEVICES empty? Unset it.",
}
"""The next step if a GPU cannot be used, by a sign in torch's error."""

_SIGNS = {
    "don't yet support saved tensor hooks": TRANSFORMS,
    "torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode": TRACES,
    "found no suitable name to keep for saving": SAVED_IN_STEP,
}


_TWO_DEVICES = "Expected all tensors to be on the same device", "Found two parameters on different devices"
"""What torch says of tensors on two devices; the latter in ``parameters_to_vector``."""

WRITTEN_IN_CALL = (
    "{what} inside a call of its layer {layer!r}, which would continue with the old weights on the GPU. Write weights after the "
    "call, or keep the layer on the GPU: SuperpipelineStrategy(keep_on_gpu=[{layer!r}])."
)


def in_our_words(error: BaseException) -> str | None:
    """Returns the message that replaces an error of torch's which this package causes; None for other errors."""
    text = str(error) if isinstance(error, (RuntimeError, TypeError)) else ""
    return next((message for sign, message in _SIGNS.items() if sign in text), None)


def about_gpu(error: BaseException) -> str | None:
    """Returns the next step if torch's first call of a GPU has raised this error; None for other errors."""
    if not any(name in str(error) for name in ("CUDA", "NVIDIA")):
        return None
    text = str(error).replace("driver version is insufficient", "driver is too old")
    step = next(step for sign, step in _GPU.items() if sign in text)
    return step.format(torch=torch.__version__, cuda=torch.version.cuda)


def note(error: BaseException, mixed: str | None, file: str | None) -> None:
    """Adds notes to an error, each at most once.

    Args:
        error: any error. See also :func:`note_places`.
        mixed: why only some layers have the weights of the last step; None or empty if all layers have weights of the same step.
        file: the path of the last checkpoint; None if none was saved.
    """
    note_places(error)
    if mixed and (text := not_whole(mixed, file)) not in getattr(error, "__notes__", ()):
        error.add_note(text)


def note_places(error: BaseException, stay: Sequence[str] = ()) -> None:
    """Adds one note to an error about tensors on two devices, though the user's own code may have mixed them.

    Args:
        error: any error.
        stay: the names of the layers that stay on the GPU, if the error was raised between two steps.
    """
    names = ", ".join(map(repr, stay[:3])) + (f" and {len(stay) - 3} more" if len(stay) > 3 else "")
    text = IN_TWO_PLACES.format(stay=names) if stay else ON_THE_HOST
    is_noted = not {text, ON_THE_HOST}.isdisjoint(getattr(error, "__notes__", ()))
    if not is_noted and isinstance(error, Exception) and any(sign in str(error) for sign in _TWO_DEVICES):
        error.add_note(text)


def not_whole(mixed: str, file: str | None) -> str:
    """Returns the message for weights of which only some were updated, with the remedy: the last checkpoint, if any."""
    remedy = (
        f"Go on from the last checkpoint: trainer.fit(model, ckpt_path={file!r})."
        if file
        else "Go on from the last checkpoint, or with a new model: this trainer has saved none."
    )
    return f"These weights are not those of any whole step, and are not saved: {mixed}. {remedy}"


def after_out_of_memory(plan: Plan) -> str:
    """Returns the advice after the device has run out of memory in a step of a plan."""
    window = "" if plan.k == plan.k_prime == 1 else "k=1, k_prime=1, "
    return (
        f"Superpipeline streamed with k={plan.k} and k_prime={plan.k_prime}: weights, gradients and steps take "
        f"{human_bytes(plan.peak_device_bytes)}, the rest are activations. Use less: "
        f'SuperpipelineStrategy({window}activations="recompute"), fewer gpu_layers, or a smaller batch.'
    )


def say_once(log: logging.Logger, line: str, said: set[str] | None = None) -> None:
    """Logs a line if it was not logged before.

    Args:
        log: the logger.
        line: the line.
        said: the lines that were logged before, to which ``line`` is added; None for those of all trainers in this process.
    """
    said = _SAID if said is None else said
    # A line that the logger drops does not count as logged.
    if line not in said and log.isEnabledFor(logging.INFO):
        said.add(line)
        log.info(line)
