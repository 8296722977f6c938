"""aclshmem's own device functions in Triton kernels, for peers that loads and stores do not reach (RDMA between hosts).

    words.py               what a kernel calls: put_nbi, get_nbi, put_signal_nbi, quiet
    custom_call.py         rewrites those calls in triton-ascend's IR to an operation that its compiler keeps
    bin/bishengir-compile  stands before the compiler of that name on PATH: rewrites, adds the shim, calls it
    shim.cpp, build.sh     the functions that are called then, on aclshmem; a user with CANN builds them

Verified as far as HIVM, the last stage that the public compiler writes. Linking the shim, and running it, needs CANN and
NPUs and was NOT done. See docs/ascend-platform.md.
"""
