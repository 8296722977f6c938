"""The decorator behind every word of the language: one function, compiled or interpreted.

Compiled, a word is an ordinary `triton.jit` function. In Triton's interpreter a word that must be seen as what it is
(a wait must yield to other programs, a put must be seen by the race detector) runs a Python body instead.
Which of the two holds is settled once, when `triton_dist` is imported, so nothing is looked up when a kernel runs.
"""

import functools

import triton

from .. import interpreted as in_interpreter


def device_function(interpreted=None):
    """Decorates a device function, callable from any `triton.jit` kernel.

    Args:
        interpreted: the Python function that runs in its place in Triton's interpreter. It takes the same parameters
            by the same names. None: the decorated function itself is interpreted.

    Returns: a decorator. When kernels are compiled, and when `interpreted` is None, it is `triton.jit`.

        @device_function()
        def ring_next(ctx):
            return (dl.rank(ctx) + 1) % dl.num_ranks(ctx)
    """

    def decorate(fn):
        if interpreted is None or not in_interpreter:
            return triton.jit(fn)

        @functools.wraps(fn)
        def body(*args, **kwargs):
            return interpreted(*args, **kwargs)

        return body

    return decorate
