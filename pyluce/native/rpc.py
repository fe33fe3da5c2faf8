# mypy: disable-error-code="empty-body"
"""ggml-rpc.h: devices of another process or machine, which serves them with `luce rpc-server`.

A device's name is `rpc:HOST:PORT`. A server serves one client at a time, and must be built from the same sources: the same kernels give
the same bits. There is no protection on the wire: loopback, or a network that is trusted.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import ClassVar

from pyluce.native import ggml_backend as api
from pyluce.native import log, stamp
from pyluce.native.declare import Bool, OptPtr, OptStr, Out, Ptr, Size, Str, function
from pyluce.native.errors import NativeError
from pyluce.native.library import load_libraries

RPC = "ggml-rpc"
SOURCES = ("pin", "patches")
"""The parts of a stamp that must be the same on both sides."""


class ggml_rpc_luce_info(ctypes.Structure):
    """What a server says of itself."""

    stamp: bytes
    description: bytes
    _fields_: ClassVar = [("stamp", ctypes.c_char * 1024), ("description", ctypes.c_char * 256)]


@function(RPC)
def ggml_backend_rpc_add_server(endpoint: Str) -> OptPtr: ...
@function(RPC)
def ggml_backend_rpc_start_server(
    endpoint: Str, cache_dir: OptStr, n_threads: Size, n_devices: Size, devices: Out
) -> None: ...
@function(RPC)
def ggml_backend_rpc_is_lost(backend: Ptr) -> Bool: ...
@function(RPC)
def ggml_backend_rpc_get_luce_info(endpoint: Str, info: Out) -> Bool: ...
@function(RPC)
def ggml_backend_rpc_describe(description: Str) -> None: ...


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server that answered: its libraries' stamp and what its device is called there."""

    stamp: str
    description: str


def connect(endpoint: str) -> ServerInfo:
    """Ask the server at `HOST:PORT`. Raises NativeError when there is none, it serves somebody else, or was built from other sources."""
    own = load_libraries().stamp
    info = ggml_rpc_luce_info()
    if not ggml_backend_rpc_get_luce_info(endpoint.encode(), ctypes.byref(info)):
        raise NativeError(
            f"expected `luce rpc-server` of this version at {endpoint}, found none that answers; start it there, or wait until "
            "it has served its other client",
            log.take(),
        )
    found = ServerInfo(info.stamp.decode("utf-8", "replace"), info.description.decode("utf-8", "replace"))
    mine, theirs = stamp.parse_stamp(own), stamp.parse_stamp(found.stamp)
    for part in SOURCES:
        if mine.get(part) != theirs.get(part):
            raise NativeError(
                f"expected a server at {endpoint} that was built from this source ({part} {mine.get(part)}), found "
                f"{part} {theirs.get(part, 'unknown')}; build and start it again there"
            )
    return found


def find_remote(endpoint: str) -> int:
    """The ``ggml_backend_dev_t`` of a server's device. Errors as of ``connect``."""
    connect(endpoint)
    registry = ggml_backend_rpc_add_server(endpoint.encode())
    if not registry or not api.ggml_backend_reg_dev_count(registry):
        raise NativeError(f"expected a device at {endpoint}, found none", log.take())
    return api.ggml_backend_reg_dev_get(registry, 0)


def serve(host: str, port: int, device: int, description: str, n_threads: int) -> None:
    """Serve a ``ggml_backend_dev_t`` to one client after the other; returns only when the address cannot be used."""
    ggml_backend_rpc_describe(description.encode()[:255])
    devices = (ctypes.c_void_p * 1)(device)
    ggml_backend_rpc_start_server(f"{host}:{port}".encode(), None, n_threads, 1, devices)
