"""Private names of torch, and patches of torch that last as long as a run.

- ``private``: every private name of torch that the package uses, each with its reason and the feature that depends on it. No
  other file uses private names, except ``tools/planner/fake`` (results of operators on tensors without memory).
- ``modes``: contexts that leave torch's modes: inference mode, dispatch modes, transforms, compilation.
- ``metadata``: the functions of a tensor that read its metadata only.
- ``patched``: patches a function of torch and restores it; detects methods of an optimizer that users have replaced.
- ``moved``: moves a module without some of its parameters.
- ``around_calls``: runs code around calls of modules, without hooks that users would see.
- ``cast_gradient``: a tensor subclass for the gradient of a cast weight.

This folder imports torch only.
"""
