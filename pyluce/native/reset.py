"""Giving back what this process's context on a GPU takes: code, streams, the driver's own memory."""

from __future__ import annotations

import ctypes

from pyluce.native import ggml_backend as api
from pyluce.native.devices import find_device, parse_device
from pyluce.native.errors import NativeError

_RESET = b"ggml_luce_device_reset"


def reset_device(name: str) -> None:
    """Destroy this process's context on a GPU; the next `Backend` on it makes a new one.

    Every object on the device must be closed, and no other library of this process may use it: theirs would be destroyed too.
    Raises ValueError for what is no GPU's name, NativeError, with nothing changed, when something of ours still uses the device or
    the driver refuses.
    """
    backend, index = parse_device(name)
    if backend == "cpu":
        raise ValueError("expected a GPU to reset, found the CPU")
    registry = api.ggml_backend_dev_backend_reg(find_device(name))
    address = api.ggml_backend_reg_get_proc_address(registry, _RESET)
    if not address:
        raise NativeError(f"expected libraries that can reset {name}, found some that cannot; build them again")
    reason = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int)(address)(index)
    if reason is not None:
        raise NativeError(f"{name} was not reset: {reason.decode()}")
