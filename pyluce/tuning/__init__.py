"""Choices between a GPU's kernels: measured once on the device at hand (`luce tune`), kept in a file, set when a model is loaded."""

from __future__ import annotations

from pyluce.tuning.apply import AUTO, NO_TUNING, OFF, TunedDevice, Tuning, tune_device
from pyluce.tuning.products import Product, model_products
from pyluce.tuning.table import Entry, TuneError, TuneTable

__all__ = [
    "AUTO",
    "NO_TUNING",
    "OFF",
    "Entry",
    "Product",
    "TuneError",
    "TuneTable",
    "TunedDevice",
    "Tuning",
    "model_products",
    "tune_device",
]
