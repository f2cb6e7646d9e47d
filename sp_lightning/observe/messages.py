"""What users read beside an error that is not this package's: what the package has to do with it, and a remedy."""

from __future__ import annotations

import logging

from sp_lightning.plan.choices import Modes
from sp_lightning.plan.plan import Plan
from sp_lightning.plan.units import human_bytes

# The lines that this process has logged.
_SAID: set[str] = set()

TRANSFORMS = (
    "torch.func.grad (or vjp, jacrev, hessian) was called inside a step: it does not support saved-tensor hooks, which "
    "streamed layers need. Use torch.autograd.grad(..., create_graph=True), or keep every layer on the device: "
    'SuperpipelineStrategy(keep_on_gpu=["**"], activations="keep").'
)

TRACES = (
    "torch.func.linearize (or make_fx) was called inside a step: it traces a function, and no trace takes a weight of a module "
    "that is streamed. Use torch.func.jvp in place of linearize; trace copy.deepcopy(module), or the module after the run."
)

HIDDEN_READ = (
    "The memory of the weight {name!r} was read while it is not on the device. A torch.func transform (vmap, jvp …), a "
    "TorchScript function or a C++ extension that is given a weight does not ask for it. Pass weight.clone() instead, or keep "
    "the weight on the device: SuperpipelineStrategy(keep_on_gpu=[{name!r}])."
)

HIDDEN_ON_GPU = (
    "The memory of the weight {name!r} was read while the weight stays on the GPU (gpu_layers). torch.tensor(weight), "
    "x.set_(weight), a TorchScript function or a C++ extension does not ask for it. Pass weight.detach().clone() instead."
)

BEING_UPDATED = (
    "A checkpoint was saved in another thread than that of trainer.fit while a step changes weights: some would be those of the "
    "next step. Save it in a callback, or try again."
)

ON_THE_HOST = (
    "Superpipeline keeps gradients on the host, and weights between two steps. Bring one of them to the other: "
    "param.grad.to(param.device) inside training_step, buffer.to(param.device) in a hook between two steps. In backward (a "
    "checkpoint or your own autograd function) take weights from their modules: a list from before the step has the host's."
)

_SIGNS = {
    "don't yet support saved tensor hooks": TRANSFORMS,
    "torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode": TRACES,
}


def in_our_words(error: BaseException) -> str | None:
    """What is to be raised in place of an error of torch's that says nothing of its reason, which is this package."""
    said = str(error) if isinstance(error, (RuntimeError, TypeError)) else ""
    return next((message for sign, message in _SIGNS.items() if sign in said), None)


def note(error: BaseException, mixed: str | None, file: str | None) -> None:
    """Adds to an error what its user should know, once.

    Args:
        error: of torch's about two devices, say: the mix may be another one of the user's.
        mixed: why only some layers have the weights of the last step, if that is so.
        file: the last checkpoint; None without one.
    """
    devices = isinstance(error, RuntimeError) and "Expected all tensors to be on the same device" in str(error)
    for said in (ON_THE_HOST if devices else "", not_whole(mixed, file) if mixed else ""):
        if said and said not in getattr(error, "__notes__", ()):
            error.add_note(said)


def not_whole(mixed: str, file: str | None) -> str:
    """Why weights are of no use but as what they were before, as sentences with their remedy: the last checkpoint, if any."""
    remedy = (
        f"Go on from the last checkpoint: trainer.fit(model, ckpt_path={file!r})."
        if file
        else "Go on from the last checkpoint, or with a new model: this trainer has saved none."
    )
    return f"These weights are not those of any whole step, and are not saved: {mixed}. {remedy}"


def less_host_memory(overlap: str = "backward") -> str:
    """How a run takes less host memory, with ``optimizer_overlap`` as it is; by default gradients are none of it."""
    advice = (
        'Use less: Trainer(precision="bf16-true"), an optimizer with less state, frozen layers, or adapters '
        "(superpipeline plan --lora 16 estimates them)."
    )
    held = overlap != "backward"
    return advice + ' SuperpipelineStrategy(optimizer_overlap="backward") holds no gradients.' * held


def after_out_of_memory(plan: Plan, smaller: Plan, freed: Modes, *, balanced: bool) -> str:
    """What a user can change after the device has run out of memory.

    Args:
        plan: the plan that the step ran with.
        smaller: the plan that the window has been shrunk to; ``plan`` itself if it could not be shrunk.
        freed: the modes that activations have been given because they take less in them; empty if they have theirs still.
        balanced: whether ``"auto"`` chooses the modes of activations already.
    """
    found = f"Superpipeline streamed with k={plan.k} and k_prime={plan.k_prime}"
    window = f"k={smaller.k}, k_prime={smaller.k_prime}"
    less = human_bytes(plan.peak_device_bytes - smaller.peak_device_bytes)
    if freed:
        freeing = "recompute" if "recompute" in freed.values() else "offload"
        return f'{found}. With SuperpipelineStrategy({window}, activations="{freeing}") activations take less' + (
            f", and there would be {less} more." if smaller is not plan else "."
        )
    if smaller is not plan:
        return f"{found}. With SuperpipelineStrategy({window}) there would be {less} more."
    if plan.k > 1 or plan.k_prime > 1:
        return f'{found}. Use less: SuperpipelineStrategy(k={max(1, plan.k // 2)}, k_prime=1), or k="auto".'
    return (
        f"{found}, which is the least: weights and gradients take {human_bytes(plan.peak_device_bytes)}, the rest are "
        "activations. Use a smaller batch" + ("." if balanced else ', or SuperpipelineStrategy(activations="auto").')
    )


def say_once(log: logging.Logger, line: str, said: set[str] | None = None) -> None:
    """Logs a line, unless it is among those that were said.

    Args:
        log: where it goes.
        line: the line.
        said: what has been said; None for all that this process has, for any trainer.
    """
    said = _SAID if said is None else said
    if line not in said and log.isEnabledFor(logging.INFO):
        said.add(line)
        log.info(line)
