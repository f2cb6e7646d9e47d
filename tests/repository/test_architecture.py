"""The shape of the package: a core whose imports go down, a folder per capability, one file that touches the accelerator."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn
from torch.nn.utils import prune
from torch.utils._device import _device_constructors

import sp_lightning
from sp_lightning import SuperpipelineStrategy
from sp_lightning.registry import CAPABILITIES
from tests.support.repository import GROUPS, folder, imports

PACKAGE = Path(sp_lightning.__file__).parent
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path.read_text()
    for path in sorted(PACKAGE.rglob("*.py"))
}
CORE = (
    "_version", "core.torch_compat", "core.device", "core.model", "core.plan", "core.messages", "core.store",
    "core.weights", "core.updates", "core.engine", "registry", "trainer", "tools.machine",
)  # fmt: skip
"""The folders of the core and of the trainer, from the ground up: each may import those before it."""
TOP = ("pytorch_lightning", "_public", "__init__", "__main__")
"""What users import or run. These files may import all others, and only capabilities may import them."""
MAY_IMPORT_LIGHTNING = {
    "trainer",
    "experimental.ranks",
    "tools.comparison",
    "tools.planner",
    "any_loop",
    *TOP,
}

BETWEEN = {
    "tools.planner": "answers questions about all of them",
    "tools.comparison": "trains with and without them",
    "capabilities.tuning": "has activations offloaded",
}
"""Capabilities that may import other capabilities, with the reason."""


def offences(file: str, source: str) -> list[str]:
    """What a file imports that it may not."""
    here = folder(file)
    wrong: list[str] = []
    # Updates get the engine as their only argument, and name its class in annotations.
    for module in imports(source, for_types=here != "core.updates"):
        top, _, rest = module.partition(".")
        there = folder(rest)
        if top in ("lightning", "pytorch_lightning") and here not in MAY_IMPORT_LIGHTNING:
            wrong.append(module)
        if top == "sp_lightning" and file != "registry" and here not in TOP and not _may_import(here, there):
            wrong.append(module)
    return wrong


def _may_import(here: str, there: str) -> bool:
    if there in CORE:
        return here in CAPABILITIES or CORE.index(there) <= CORE.index(here)
    if there in CAPABILITIES:
        # The core imports no capability: each enters by ``sp_lightning/registry.py``.
        return there == here or here in BETWEEN
    return here in CAPABILITIES or there == "SuperpipelineStrategy"


@pytest.mark.long("takes a second or more")
def test_imports_go_down() -> None:
    assert {folder(file) for file in FILES} <= {*CORE, *TOP, *CAPABILITIES, *(f"{each}.__init__" for each in GROUPS)}, (
        "a new folder needs its place in the order"
    )
    assert {file: wrong for file, source in FILES.items() if (wrong := offences(file, source))} == {}


def test_the_import_check_can_fail() -> None:
    assert offences("core.plan.plan", "from sp_lightning.core.engine.engine import Engine") == [
        "sp_lightning.core.engine.engine.Engine"
    ]
    assert offences("core.engine.step", "def f():\n    from sp_lightning import registry") == ["sp_lightning.registry"]
    assert offences("core.weights.ring", "import lightning.pytorch as pl") == ["lightning.pytorch"]
    assert offences("core.weights.ring", "from sp_lightning.core.store.block import HostBlock") == []


LIGHTNINGS = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities")
COMPAT = "trainer.compat"
INHERITED = frozenset(
    name
    for base in (SingleDeviceStrategy(), Callback(), TorchCheckpointIO())
    for name in dir(base)
    if name.startswith("_") and not name.startswith("__")
)
"""The private attributes of the classes of Lightning that classes of this package derive from."""


def private_attributes(source: str) -> Iterator[tuple[str, bool]]:
    """All private attributes that a source uses, by name, and whether it uses them on ``self``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            yield node.attr, isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


COVERED = frozenset(name for name, _ in private_attributes(FILES[COMPAT]))
"""The private attributes of Lightning that ``compat`` uses for everybody."""


def privates_of_lightning(file: str, source: str) -> list[str]:
    """What a file uses of Lightning that is private."""
    imported = [
        module
        for module in imports(source)
        if module.split(".")[0] in LIGHTNINGS and any(part.startswith("_") for part in module.split("."))
    ]
    return imported + [
        name for name, on_self in private_attributes(source) if name in (INHERITED if on_self else COVERED)
    ]


@pytest.mark.long("takes a second or more")
def test_one_file_knows_what_is_private_in_lightning() -> None:
    assert {file for file, source in FILES.items() if privates_of_lightning(file, source)} == {COMPAT}


def test_the_check_of_private_names_can_fail() -> None:
    assert "_skip_backward" in COVERED
    assert "_root_device" in INHERITED
    source = """
from lightning.fabric.utilities.init import _EmptyInit
from lightning.pytorch.strategies import Strategy
import pytorch_lightning._graveyard

class Mine(Strategy):
    def run(self):
        self._window = self._root_device
        return self.trainer.fit_loop._skip_backward
"""
    assert sorted(privates_of_lightning("trainer.strategy", source)) == [
        "_root_device",
        "_skip_backward",
        "lightning.fabric.utilities.init._EmptyInit",
        "pytorch_lightning._graveyard",
    ]


@pytest.mark.long("takes a second or more")
def test_one_file_touches_the_accelerator() -> None:
    found = {
        file
        for file, source in FILES.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch"
        if node.attr in {"cuda", "accelerator", "Stream", "Event", "xpu", "mps"}
    }
    assert found == {"core.device.accelerator"}


FACTORIES = {each.__name__ for each in _device_constructors()}
"""The functions whose results are on the default device (``torch.set_default_device``), if their calls name none."""


def on_the_default_device(source: str) -> list[str]:
    """Where a source makes tensors without a device. The user's default device is active in hooks and steps."""
    nodes = list(ast.walk(ast.parse(source)))
    named = {
        id(node.func) for node in nodes if isinstance(node, ast.Call) and "device" in {k.arg for k in node.keywords}
    }
    return [
        ast.unparse(node)
        for node in nodes
        if isinstance(node, ast.Attribute)
        and _chain(node)[0] == "torch"
        and node.attr in FACTORIES
        and id(node) not in named
    ]


@pytest.mark.long("takes a second or more")
def test_every_tensor_has_a_device_by_name() -> None:
    found = {file: made for file, source in FILES.items() if (made := on_the_default_device(source))}
    # Compared with the function that a mode sees, and not called.
    assert found == {"tools.planner.known_values": ["torch.tensor", "torch.as_tensor"]}


def test_the_check_of_devices_can_fail() -> None:
    assert on_the_default_device("torch.empty(3, dtype=torch.uint8)") == ["torch.empty"]
    assert on_the_default_device("make = partial(torch.zeros, 3)") == ["torch.zeros"]
    assert on_the_default_device('torch.tensor([1], device="cpu") + torch.zeros_like(x)') == []


PUBLIC_ENOUGH = {
    "_version": "torch's notes on autograd describe it, and there is no other name for it",
    "_parameters": "the table in which a module has its parameters; setattr would register anew and run user code",
    "_buffers": "the table in which a module has its buffers, for the same reason",
    "_modules": "the table in which a module has its modules, for the same reason",
}
"""Privates of torch that any file may use, with the reason."""

PRIVATES: dict[str, set[str]] = {
    # Overridden: methods have to have their names. test_torch_private.py calls them.
    "any_loop.transformers_trainer": {"_apply"},  # what `Module.to` calls, which cannot leave children out
    "core.torch_compat.moved": {"_apply"},  # of children, as torch's own method calls it
    "trainer.scaler": {"_get_scale_async", "_unscale_grads_"},
}
"""Privates of torch that one file may use beside ``torch_compat.private``."""


def _torch_attributes() -> set[str]:
    """Attributes with an underscore that objects of torch have."""
    module = prune.identity(nn.Linear(1, 1), "weight")
    module.compile(backend="eager")
    objects = [
        torch.Tensor, torch.nn.Parameter(torch.ones(1)), torch.UntypedStorage, torch.autograd.Function, torch.ops.aten.add,
        torch.ops.aten.add.Tensor, torch.ops.aten._to_copy.default, torch.amp.GradScaler("cpu", enabled=False), nn.LSTM(1, 1),
        torch.optim.SGD(module.parameters()), module, *module._forward_pre_hooks.values(), torch, torch.autograd,
        torch.ops.aten, torch.nn.init,
    ]  # fmt: skip
    names = {name for each in objects for name in dir(each)} | {"_is_param"}
    return {name for name in names if _is_private(name)} - set(PUBLIC_ENOUGH)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


TORCH_ATTRIBUTES = _torch_attributes()


def torch_privates(source: str) -> set[str]:
    """Names of torch with an underscore that a source uses.

    What is reached from an import of torch's is one. So is an attribute, a keyword or a string by the name of one of
    torch's objects' attributes, unless the file gives its own objects that attribute.
    """
    nodes = list(ast.walk(ast.parse(source)))
    of_torch: set[str] = set()
    own: set[str] = set()
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or node.names[0].name
            if module.split(".")[0] == "torch":
                of_torch |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _chain(node)[0] == "self":
            own.add(node.attr)
    used = {part for module in imports(source) if module.startswith("torch.") for part in module.split(".")}
    others = TORCH_ATTRIBUTES - own
    for node in nodes:
        if isinstance(node, ast.Attribute):
            base, *rest = _chain(node)
            used |= set(rest) if base in of_torch else {node.attr} & (TORCH_ATTRIBUTES if base == "super()" else others)
        elif isinstance(node, ast.keyword):
            used |= {node.arg or ""} & others
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used |= set(node.value.split(".")) & others
    return {name for name in used if _is_private(name)} - set(PUBLIC_ENOUGH)


def _chain(node: ast.expr) -> list[str]:
    """``a.b.c`` as a list; the first is ``super()`` or empty where it is no name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        return [node.id, *names]
    is_super = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    return ["super()" if is_super else "", *names]


@pytest.mark.long("takes a second or more")
def test_one_file_uses_privates_of_torch() -> None:
    found = {file: used for file, source in FILES.items() if (used := torch_privates(source))}
    assert {
        file: used for file, used in found.items() if file not in ("core.torch_compat.private", "tools.planner.fake")
    } == PRIVATES
    everything = "".join(FILES.values())
    assert all(f".{name}" in everything and reason for name, reason in PUBLIC_ENOUGH.items())


def test_the_check_for_privates_can_fail() -> None:
    assert torch_privates("import torch\ntorch._C._current_graph_task_id()") == {"_C", "_current_graph_task_id"}
    assert torch_privates("from torch.utils._pytree import tree_map") == {"_pytree"}
    assert torch_privates("from torch.autograd import _unsafe_preserve_version_counter as keep") == {
        "_unsafe_preserve_version_counter"
    }
    assert torch_privates("from torch.autograd import forward_ad as ad\nad._current_level") == {"_current_level"}
    assert torch_privates("def f(optimizer): return optimizer._optimizer_step_pre_hooks") == {
        "_optimizer_step_pre_hooks"
    }
    assert torch_privates("def f(hook): return hook._tensor_name") == {"_tensor_name"}
    assert torch_privates("def f(p): return getattr(p, '_backward_hooks', None)") == {"_backward_hooks"}
    assert torch_privates("def f(made): vars(made).update(_is_param=True)") == {"_is_param"}
    assert torch_privates("class A(S):\n  def _apply(self): return super()._apply()") == {"_apply"}
    assert torch_privates("class A:\n  def f(self):\n    self._values = 1\n    return self._values") == set()
    assert torch_privates("def f(module): return module._parameters, module.weight._version") == set()


def test_the_public_names_are_frozen() -> None:
    """Public names: imports, and attributes of a strategy beside Lightning's own. The CHANGELOG lists changes."""
    assert sp_lightning.__all__ == [
        "FabricStrategy",
        "Plan",
        "PlannedLayer",
        "Stats",
        "StreamedTrainer",
        "SuperpipelineCallback",
        "SuperpipelineStrategy",
        "__version__",
        "check",
        "compile_blocks",
        "dial",
        "load_mxfp4",
        "pack_experts",
        "rank_order_hook",
        "stream",
    ]
    lightnings = {*dir(SingleDeviceStrategy()), *dir(DDPStrategy())}
    own = {name for name in dir(SuperpipelineStrategy()) if not name.startswith("_") and name not in lightnings}
    assert own == {
        "activations", "fetches", "gpu_memory", "gpu_released", "gradient_norm", "gradients_are_finite", "ledger", "log", "plan",
        "remarks", "stats",
    }  # fmt: skip
