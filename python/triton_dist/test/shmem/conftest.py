"""A machine that looks as if it had NPUs: see ascend_stand_in."""

import os
from pathlib import Path

import pytest
import torch

STAND_IN = Path(__file__).parent / "ascend_stand_in" / "packages"
TORCH = torch.__version__.partition("+")[0]
FITTING = {"triton-ascend": "3.2.0", "torch": TORCH, "torch-npu": TORCH, "cann-shmem": "1.2.0"}


@pytest.fixture(scope="session")
def ascend_machine(tmp_path_factory):
    """`ascend_machine(cann="8.5.0", **versions)`: the environment variables of a machine with these versions.

    STAND_IN_PATH has what goes in front of sys.path there. A version None: not installed. cann "": its version file is
    missing; None: set_env.sh was not sourced.
    """

    def make(cann="8.5.0", compiler=True, **versions):
        folder = tmp_path_factory.mktemp("ascend")
        for name, version in {**FITTING, **{name.replace("_", "-"): one for name, one in versions.items()}}.items():
            if version is not None:
                about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
                about.mkdir()
                (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        home = folder / "cann" / "x86_64-linux"
        home.mkdir(parents=True)
        if cann:
            (home / "ascend_toolkit_install.info").write_text(f"package_name=Ascend-cann-toolkit\nversion={cann}\n")
        (folder / "bin").mkdir()
        if compiler:
            (folder / "bin" / "bishengir-compile").touch(0o755)
        return {
            "TRITON_DIST_BACKEND": "ascend",
            "STAND_IN_PATH": os.pathsep.join([str(STAND_IN), str(folder)]),
            "ASCEND_HOME_PATH": "" if cann is None else str(folder / "cann"),
            "TRITON_NPU_COMPILER_PATH": str(folder / "bin"),
        }

    return make
