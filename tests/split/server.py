"""`luce rpc-server` as a process: the second device of the tests."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RpcServer:
    """Serves the CPU with one thread at a port of its own; can be killed and started again."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[str] | None = None
        self.start()

    @property
    def device(self) -> str:
        """Its name as a device."""
        return f"rpc:127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it; returns when it listens, or AssertionError with what it said."""
        command = [sys.executable, "-m", "cli.main", "rpc-server", "--port", str(self.port), "--threads", "1"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        said: list[str] = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("serving"):
                break
        self._process = process
        threading.Thread(target=process.stdout.read, daemon=True).start()
        for _ in range(400):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert process.poll() is None, "".join(said)
            threading.Event().wait(0.02)
        raise AssertionError(f"nobody listens at {self.port}: {''.join(said)}")

    def kill(self) -> None:
        """End it without a word. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
