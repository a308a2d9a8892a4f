"""The connection of this process to a Ray cluster: made once, within a deadline, and kept until the process ends."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollover.cluster.config import ClusterConfig
from rollover.errors import ConfigError, require

NAMESPACE = "rollover"
"""Ray namespace of the names of actors."""

_names: set[str] = set()
"""Addresses under which configs have named the cluster that this process is connected to: "127.0.0.1:6379", which Ray
calls by the machine's address in the network, for instance."""

_FIND = """
import socket, sys
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._raylet import GcsClient
found = canonicalize_bootstrap_address_or_die(sys.argv[1])
host, _, port = (found if sys.argv[1] == "auto" else sys.argv[1]).rpartition(":")
socket.create_connection((host.strip("[]"), int(port)), timeout=float(sys.argv[2])).close()
GcsClient(address=found)
print(found)
"""
"""Ray itself tries an address for two minutes, even if it refuses, and then ends the process; this can be ended
before."""


def connect(config: ClusterConfig) -> Any:
    """Connect this process to the cluster, unless it is connected already, and return the module ``ray``.

    Raises:
        MissingExtra: Ray is not installed.
        ConfigError: no cluster answers at the address within ``placement_timeout_s``, its Ray or Python is another, or
            this process belongs to another cluster already.
    """
    require("ray", purpose="[cluster]")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # says that Ray need not warn of this change
    import ray

    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if config.address not in ("auto", here, *_names) and not _is_at(here, config):
            raise ConfigError(
                f"cluster.address is {config.address}, but this process is connected to the Ray cluster at {here}: a"
                " process can use one cluster only"
            )
        _names.add(config.address)
        return ray
    address = _find(config)
    try:
        with _own_signal_handlers():
            ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
            )
    except (ConnectionError, RuntimeError, ValueError, SystemExit) as error:
        raise ConfigError(f"cluster.address {address!r} cannot be used: {_in_one_line(str(error))}") from error
    _names.clear()
    _names.add(config.address)
    return ray


def _is_at(address: str, config: ClusterConfig) -> bool:
    """Return whether the cluster that the config names is the one at ``address``."""
    try:
        return _find(config) == address
    except ConfigError:
        return False


def _find(config: ClusterConfig) -> str:
    """Return the address of a cluster that answers."""
    remedy = "start one with 'ray start --head', or correct cluster.address"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _FIND, config.address, str(config.placement_timeout_s)],
            capture_output=True,
            text=True,
            timeout=config.placement_timeout_s,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"no Ray cluster answers at {config.address!r} (cluster.address) within {config.placement_timeout_s:g} s:"
            f" {remedy}"
        ) from None
    if done.returncode == 0:
        return done.stdout.strip()
    reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    reason = reason.partition("Error: ")[2] or reason
    raise ConfigError(f"no Ray cluster at {config.address!r} (cluster.address): {_in_one_line(reason)}; {remedy}")


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep the handlers of this process's signals, where Ray would put its own in their place."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")
