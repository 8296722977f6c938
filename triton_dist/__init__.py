"""Distributed Triton kernels on stock Triton: a symmetric heap, signals, and the operators built on them.

Importing this package picks the platform, once per process and without importing torch (see `backends.choice`):

    backend      "cpu", "nvidia" or "ascend"; TRITON_DIST_BACKEND overrides the choice
    interpreted  True when kernels run in Triton's interpreter (platform cpu with numpy installed)

Import it before triton, or export TRITON_INTERPRET=1: Triton decides at its own import whether it interprets.
"""

from .backends import choice as _choice

__version__ = "0.1.0"

backend = _choice.choose()
interpreted = _choice.turn_interpreter_on() if backend == "cpu" else False

if interpreted:
    _choice.install_interpreter()
