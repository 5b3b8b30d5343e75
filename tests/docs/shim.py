"""Shim: `genserve` in the shell blocks of the pages; `serve` takes free ports, and ends when it is ready."""

from __future__ import annotations

import signal
import subprocess
import sys

arguments = sys.argv[1:]
command = [sys.executable, "-m", "genserve", *arguments]
if arguments[:1] != ["serve"]:
    sys.exit(subprocess.run(command, check=False).returncode)
command += ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    is_ready = any(line.startswith("Ready at") for line in process.stdout)
    process.send_signal(signal.SIGINT)
    process.stdout.read()
sys.exit(0 if is_ready else 1)
