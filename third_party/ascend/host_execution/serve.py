"""The compile server's process: python -m third_party.ascend.host_execution.serve SOCKET. Runs where triton-ascend is.

A task: {"file", "name", "signature": {parameter: type}, "constants": {parameter: value}}; see `lowering.lower`
(constants as `arguments.encoded` makes them).
Its answer: {"library": path, "parameters": [type]}, or {"stage": what refused, "error": text}.
"""

import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Listener
from pathlib import Path

from triton import language

from .. import lowering, sources
from ..arguments import decoded
from . import build, host_ir


def compile_task(task, folder):
    key = hashlib.sha256(json.dumps(task, sort_keys=True).encode()).hexdigest()[:24]
    try:
        module = sources.load(task["file"], task["name"])
        fn = sources.unwrapped(getattr(module, task["name"]))
        constants = {name: decoded(value, language) for name, value in task["constants"].items()}
    except sources.HostCodeError as error:
        return {"stage": "import", "error": str(error)}
    except Exception:
        return {"stage": "import", "error": traceback.format_exc(limit=-3)}
    lowered = lowering.to_ttadapter(fn, task["signature"], constants)
    if lowered.ttadapter is None:
        return {"stage": "ttadapter" if lowered.ttir else "ttir", "error": lowered.log}
    if folder_kept := os.environ.get("TRITON_DIST_HOST_IR"):
        Path(folder_kept, f"{task['name']}-{key[:6]}.ttadapter.mlir").write_text(lowered.ttadapter)
    try:
        library = str(Path(folder) / f"{key}.so")
        return {"library": library, "parameters": build.build(lowered.ttadapter, library)}
    except (build.BuildError, host_ir.NotForTheHost) as error:
        return {"stage": "host", "error": str(error)}


def main(address):
    try:
        build.check_machine()
    except build.BuildError as error:
        sys.exit(str(error))

    def end_with_parent():
        sys.stdin.buffer.read()
        shutil.rmtree(Path(address).parent, ignore_errors=True)  # a parent that was killed cannot
        os.killpg(os.getpgrp(), signal.SIGKILL)  # its own group: a tool that still runs ends, too

    threading.Thread(target=end_with_parent, daemon=True).start()
    answers = {}  # a task's text -> its answer: ranks ask for the same kernels
    with Listener(address, "AF_UNIX", backlog=64) as listener:
        print("ready", flush=True)
        while True:
            with listener.accept() as connection:
                text = connection.recv_bytes()
                if text not in answers:
                    try:
                        answers[text] = compile_task(json.loads(text), Path(address).parent)
                    except Exception:
                        answers[text] = {"stage": "server", "error": traceback.format_exc()}
                connection.send_bytes(json.dumps(answers[text]).encode())


if __name__ == "__main__":
    main(sys.argv[1])
