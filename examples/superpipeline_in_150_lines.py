"""The idea of Superpipeline on one page: train a model whose weights do not fit on the GPU.

    host store ──upload──▶ slot ──▶ compute ──▶ gradients ──offload──▶ host ──▶ optimizer step
    (pinned CPU memory)    (GPU)     (GPU)        (GPU)          (pinned memory)     (CPU)

All weights stay in CPU memory. The GPU has k + k' slots, each for the weights of one block. While a block computes, the
next k' blocks are uploaded. Forward keeps only the input of each block. Backward calls the blocks in reverse order: it
runs each block again, now with a graph, and offloads its gradients to the CPU, where your optimizer steps. Results equal
plain training's, bit for bit. Blocks: float32, one shape, trained, called once per step, no shared weights, no buffers.
"""

import argparse
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from copy import deepcopy
from types import SimpleNamespace as Slot
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
device = torch.get_device_module(DEVICE)  # torch.cuda, or torch.cpu: its streams do nothing, and its events are None


class Superpipeline:
    def __init__(self, model: nn.Sequential, k: int, k_prime: int) -> None:
        self.k, self.k_prime, self.uploaded, self.offloaded = k, k_prime, 0, 0  # the last two are bytes
        self.trace = [*model, *reversed(model)]  # the order of block calls in a batch: forward, then backward
        self.compute, self.upload, self.offload = device.current_stream(), device.Stream(), device.Stream()
        # The host store: weights and gradients in CPU memory. Only copies from and to pinned memory run beside compute.
        self.gradients = {p: torch.zeros_like(p, pin_memory=DEVICE == "cuda") for p in model.parameters()}
        for p in model.parameters():
            p.data = torch.zeros_like(p, pin_memory=DEVICE == "cuda").copy_(p.data)  # your optimizer still has p
        # A slot: GPU memory, the block that it holds, and events after the block's upload and after its last use.
        shapes, count = {name: p.shape for name, p in model[0].named_parameters()}, min(k + k_prime, len(model))
        assert all({name: p.shape for name, p in each.named_parameters()} == shapes for each in model), "other shapes"
        memory = [{name: torch.empty(shape, device=DEVICE) for name, shape in shapes.items()} for _ in range(count)]
        self.slots = [Slot(weights=w, block=None, uploaded=None, free=self.compute.record_event()) for w in memory]
        self.in_flight: tuple[Any, Sequence[Tensor]] = (None, [])  # gradients, and the event after their offload
        self.peak = Counter(weights=sum(size(weights.values()) for weights in memory))  # bytes on the device at once

    def fetch(self, call: int) -> Any:
        """Upload the blocks of this call and the next k' calls that no slot holds. Return the slot of this call."""
        window = self.trace[max(call - self.k + 1, 0) : call + self.k_prime + 1]
        for block in self.trace[call : call + self.k_prime + 1]:
            if all(slot.block is not block for slot in self.slots):
                slot = next(slot for slot in self.slots if slot.block not in window)  # evict: nothing to copy back
                self.upload.wait_event(slot.free)  # do not overwrite weights that a call still reads
                with device.stream(self.upload), torch.no_grad():
                    for name, parameter in block.named_parameters():
                        slot.weights[name].copy_(parameter, non_blocking=True)
                slot.block, slot.uploaded = block, self.upload.record_event()
                self.uploaded += size(slot.weights.values())
        slot = next(slot for slot in self.slots if slot.block is self.trace[call])
        self.compute.wait_event(slot.uploaded)  # do not read weights before they are complete
        return slot

    def forward_and_backward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the loss. The parameters, which are in CPU memory, have their gradients in ``.grad``."""
        inputs, n = [], len(self.trace) // 2
        for slot in self.slots:
            slot.block = None  # the last optimizer step has changed the weights in the host store
        for call in range(n):
            slot = self.fetch(call)
            inputs.append(x)
            with torch.no_grad():
                x = functional_call(slot.block, slot.weights, x)
            slot.free = self.compute.record_event()
        loss = nn.functional.mse_loss(x.requires_grad_(), target)
        self.peak["activations"] = max(self.peak["activations"], size([*inputs, x, target]))
        (gradient,) = torch.autograd.grad(loss, x)
        for call in range(n, 2 * n):
            slot = self.fetch(call)
            kept = {each.data_ptr(): each.nbytes for each in inputs}
            x, weights = inputs.pop().detach(), {name: each.detach() for name, each in slot.weights.items()}
            wanted = [each.requires_grad_() for each in (x, *weights.values())]
            with keeping(kept, without=weights.values()):
                y = functional_call(slot.block, weights, x)
            self.peak["activations"] = max(self.peak["activations"], sum(kept.values()))
            gradient, *gradients = torch.autograd.grad(y, wanted, gradient)
            slot.free = self.compute.record_event()
            self.offload_gradients(slot.block, gradients)
        device.synchronize()  # all copies are complete: the optimizer may read gradients and write weights
        return loss.detach()

    def offload_gradients(self, block: nn.Module, gradients: Sequence[Tensor]) -> None:
        self.offload.wait_event(self.compute.record_event())  # do not copy gradients before they are complete
        with device.stream(self.offload):
            for parameter, gradient in zip(block.parameters(), gradients, strict=True):
                parameter.grad = self.gradients[parameter].copy_(gradient, non_blocking=True)
        (done, before), self.in_flight = self.in_flight, (self.offload.record_event(), gradients)
        self.peak["gradients"] = max(self.peak["gradients"], size([*before, *gradients]))
        self.offloaded += size(gradients)
        if done:  # the gradients before these are alive until their copy is over: the allocator knows only compute
            done.synchronize()


def size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def keeping(kept: dict[int, int], without: Collection[Tensor]) -> Any:
    """Note the memory that autograd keeps for backward, except weights: address and bytes. For the table only."""

    def note(tensor: Tensor) -> Tensor:
        if (memory := tensor.untyped_storage()).data_ptr() not in [weight.data_ptr() for weight in without]:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--k", type=int, default=2, help="slots for blocks in use (%(default)s)")
    parser.add_argument("--k-prime", type=int, default=1, help="blocks to upload meanwhile (%(default)s)")
    options, steps = parser.parse_args(argv), 3
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU()) for _ in range(8)))
    streamed = Superpipeline(model := deepcopy(plain), options.k, options.k_prime)
    optimizer = torch.optim.AdamW([*plain.parameters(), *model.parameters()], lr=1e-3)  # each parameter by itself
    for _ in range(steps):
        x, target = (torch.randn(64, 256).to(DEVICE) for _ in range(2))
        weights = {name: p.to(DEVICE) for name, p in plain.named_parameters()}  # on a CPU, the parameters themselves
        kept: dict[int, int] = {}
        with keeping(kept, without=weights.values()):
            plain_loss = nn.functional.mse_loss(functional_call(plain, weights, x), target)
        optimizer.zero_grad()  # after forward, as Lightning does
        plain_loss.backward()  # also copies gradients to the CPU: a GPU's AdamW could round differently
        loss = streamed.forward_and_backward(x, target)
        optimizer.step()
        pairs = [(plain_loss, loss), *zip(plain.parameters(), model.parameters(), strict=True)]
        if not all(torch.equal(*pair) for pair in pairs):
            raise SystemExit("losses or weights differ")
    total = size(plain.parameters())
    # In ordinary training, the optimizer state is on the device, too. Temporary tensors of operators are not counted.
    memory = {"weights": total, "gradients": total, "optimizer state": 2 * total, "activations": sum(kept.values())}
    rows = [(name, nbytes, streamed.peak[name]) for name, nbytes in memory.items()]
    rows += [("total", sum(memory.values()), sum(streamed.peak.values()))]
    rows += [("uploaded", 0, streamed.uploaded // steps), ("offloaded", 0, streamed.offloaded // steps)]
    print(f"KiB on {DEVICE}, and copied in a batch     plain  k={options.k}, k'={options.k_prime}")
    for name, ordinary, ours in rows:
        print(f"{name:28}{ordinary / 1024:10,.0f}{ours / 1024:10,.0f}")
    print("All losses and weights are equal, bit for bit.")


if __name__ == "__main__":
    main()
