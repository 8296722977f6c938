"""The compile server's process: python -m third_party.ascend.host_execution.serve SOCKET. Runs where triton-ascend is.

A task: {"file", "name", "signature": {parameter: type}, "constants": {parameter: value}}; see `lowering.lower`.
Its answer: {"library": path, "parameters": [type]}, or {"stage": what refused, "error": text}.
"""

import hashlib
import json
import os
import sys
import threading
import traceback
from multiprocessing.connection import Listener
from pathlib import Path

from .. import lowering, sources
from . import build, host_ir


def compile_task(task, folder):
    key = hashlib.sha256(json.dumps(task, sort_keys=True).encode()).hexdigest()[:24]
    try:
        module = sources.load(task["file"], task["name"])
        fn = getattr(module, task["name"])
    except Exception:
        return {"stage": "import", "error": traceback.format_exc(limit=-3)}
    lowered = lowering.to_ttadapter(fn, task["signature"], task["constants"])
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
        os._exit(0)

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
