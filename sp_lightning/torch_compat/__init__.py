"""What the package uses of torch beyond its public API, and what it exchanges in torch for the length of a run.

- ``private``: every private name of torch that the package uses, each with its reason and the feature that depends on it. No
  other file uses private names, except ``planner/fake`` (results of operators on tensors without memory).
- ``modes``: torch's modes (inference mode, dispatch modes, transforms, compilation) as contexts.
- ``metadata``: the functions of a tensor that do not read its values.
- ``patched``: exchanges a function of torch and restores it; knows which methods of an optimizer users have replaced.
- ``around_calls``: runs code around calls of modules, without hooks that users would see.
- ``cast_gradient``: the gradient of a cast weight, for autograd.

This folder imports torch only.
"""
