"""Compiling for a target in a process of its own: which backend this library and Triton take is decided at their import."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
LEFT_OUT = "TRITON_INTERPRET", "TRITON_DEBUG", "TRITON_DIST_WAIT_TIMEOUT", "G_IP_PORT"  # they change what is compiled


def compiled_by(script, folder, timeout=300):
    """What `python script OUT` of this folder writes to OUT as JSON; fails with the end of its stderr."""
    out = folder / "compiled.json"
    environment = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    done = subprocess.run(
        [sys.executable, HERE / script, out],
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())
