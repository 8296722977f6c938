"""Executes lowered kernels on the host: the ttadapter IR of triton-ascend, compiled for the CPU, on ranks that share a heap.

    compiler.py, serve.py    a compile server in the toolchain's environment, and how to ask it
    host_ir.py               ttadapter IR without what only an NPU has
    build.py, runtime.c      that IR as a shared library; what it calls; the grid, a thread a program
    engine.py                in a rank: kernel[grid](...) runs that library in the place of Triton's interpreter
    run.py, cases/           every word and every operator on ranks, against references
    script.py                a user's script on ranks
    not_executable.json      what does not run so, and why; a test checks it
"""
