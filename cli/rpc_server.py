"""`luce rpc-server`: lend a device of this machine to a `luce run --expert-device rpc:HOST:PORT` elsewhere."""

from __future__ import annotations

import ipaddress
import logging
import signal
import socket

import click

from cli.loading import Failure
from pyluce.native import NativeError, list_devices, load_libraries, log, rpc
from pyluce.native.devices import find_device, parse_device
from pyluce.options import MAX_THREADS, available_cpus

DEFAULT_PORT = 50052


@click.command("rpc-server")
@click.option("--host", default="127.0.0.1", show_default=True, help="The IPv4 address to listen at.")
@click.option("--port", type=click.IntRange(1, 65535), default=DEFAULT_PORT, show_default=True)
@click.option("--device", default="cpu", show_default=True, metavar="cpu|cuda:N|hip:N", help="What to lend.")
@click.option("--threads", type=click.IntRange(1, MAX_THREADS), help="CPU threads.  [default: the CPUs there are]")
def rpc_server(host: str, port: int, device: str, threads: int | None) -> None:
    """Serve a device to one client at a time, until interrupted.

    Whoever reaches the address can use the device's memory as they like: there is neither a password nor encryption.
    """
    try:
        address = ipaddress.IPv4Address(host)
        backend, _ = parse_device(device)
    except ValueError as error:
        raise click.UsageError(f"--host or --device: {error}") from error
    if backend == "rpc":
        raise click.UsageError(f"--device: expected a device of this machine, found {device!r}")
    if threads is not None and backend != "cpu":
        raise click.UsageError(f"--threads: expected none with --device {device}")
    if not address.is_loopback:
        click.echo(
            f"warning: {host} can be reached from other machines; whoever does can read and write this device's memory. "
            "Use it in a network that you trust",
            err=True,
        )
    try:
        load_libraries(backend)
        address_of_device = find_device(device)
        info = next(info for info in list_devices() if info.device == device)
    except NativeError as error:
        raise Failure(str(error)) from error
    _check_free(host, port)
    description = ", ".join(part for part in (device, info.description, info.architecture) if part)
    click.echo(f"serving {description} at rpc:{host}:{port}; Ctrl-C ends it")
    shown = logging.StreamHandler()
    shown.setLevel(logging.WARNING)
    logging.getLogger("pyluce.native").addHandler(shown)  # why a client's command was refused
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the server does not return to Python
    rpc.serve(host, port, address_of_device, description, threads or available_cpus())
    raise Failure("\n".join([f"the server at {host}:{port} ended", *log.tail(5)]))


def _check_free(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise Failure(f"--host, --port: {host}:{port} cannot be used: {error.strerror}") from error
