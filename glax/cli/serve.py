"""Run `glax serve`: answer OpenAI's clients with a model in a folder."""

import contextlib
import functools
import gc
import ipaddress
import os
import signal
import socket
import sys
from pathlib import Path

from glax._src.core.files import read_regular
from glax.cli.errors import UsageError, reason, require
from glax.cli.generate import stored_programs
from glax_cli.arguments import INTERRUPTED

PACKAGES = ("flax", "safetensors", "starlette", "uvicorn", "jinja2")
OPTIONS = ("capacity", "rows", "max_length", "queue", "state_bytes", "prefix_bytes")  # of the scheduler
KEY = "GLAX_API_KEY"
SPARE_CONNECTIONS = 256  # beyond those of requests that have a slot or wait: for refusals, health and metrics


def run(args) -> int:
    require(PACKAGES)
    key = read_key(args.api_key_file)
    programs = stored_programs() if args.compilation_cache else contextlib.nullcontext()
    with contextlib.closing(bound(args.host, args.port)) as listening, programs:
        return serve(args, listening, key)


def serve(args, listening: socket.socket, key: str | None) -> int:
    """Load the model, and answer until a signal comes. Return the exit code."""
    app, listener = prepared(args, listening, key)
    host, port = listening.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    if app.hosts is None and key is None:
        print(f"glax serve: {address} can be reached from outside, and no key is asked for", file=sys.stderr)
    app.scheduler.warm_up()
    gc.collect()
    gc.freeze()  # collections hold Python's lock, and no round begins meanwhile: they pass over what stays to the end
    app.scheduler.start()
    listening.listen()  # clients that call before the first round of the loop wait
    try:
        print(f"{app.served.name} answers at http://{address}:{port}/v1", flush=True)
        listener.run(sockets=[listening])
    finally:
        app.scheduler.stop()
    return INTERRUPTED if listener.signal == signal.SIGINT else 0


def prepared(args, listening: socket.socket, key: str | None):
    """Return (the application, the `Listener` that runs it). Raises UsageError for a folder or an option that cannot be
    served."""
    from glax.server.app import Server
    from glax.server.listening import Listener
    from glax.server.scheduler import Scheduler

    try:
        model, description = loaded(args)
        scheduler = Scheduler(model, **{name: vars(args)[name] for name in OPTIONS})
    except (ValueError, OSError) as error:
        raise UsageError(reason(error)) from None
    is_local = ipaddress.ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback
    hosts = frozenset(("localhost", "127.0.0.1", "::1", args.host.lower())) if is_local else None
    app = Server(description, scheduler, body_bytes=args.body_bytes, key=key, hosts=hosts)
    connections = args.capacity + args.queue + SPARE_CONNECTIONS
    return app, Listener(app, functools.partial(app.drain, args.grace), connections)


def loaded(args):
    """Return (the model of the folder, the `Served` that all calls share).

    On one device the programs are compiled, too. Those for several depend on where the parameters lie.
    """
    import jax.numpy as jnp

    from glax._src.core.compiling import beside
    from glax.models.generation import generation_defaults
    from glax.models.load import opened_model
    from glax.models.tokens import find_tokenizer
    from glax.server.protocol import Served, name_of
    from glax.server.scheduler import blocks_within, default_rows
    from glax.server.slots import BLOCK, Slots
    from glax.server.templates import find_template
    from glax.server.text import TokenBytes

    dtype = None if args.dtype is None else jnp.dtype(args.dtype)
    model, read = opened_model(args.folder, dtype=dtype, mesh=tensor_mesh(args.tensor))
    tokenizer = find_tokenizer(args.folder, model.vocabulary, args.tokenizer)
    defaults = generation_defaults(model)
    if defaults.unsupported:
        rest = ", ".join(defaults.unsupported)
        print(f"glax serve: not supported, and not done: {rest} in generation_config.json", file=sys.stderr)
    if args.tensor == 1:
        slots = Slots(model, args.capacity, args.max_length, args.state_bytes)
        blocks = blocks_within(args.prefix_bytes, slots, BLOCK)
        store = slots.store_shapes(blocks, BLOCK) if blocks else None
        rows = default_rows() if args.rows is None else args.rows
        beside(functools.partial(slots.compile, rows, store), read)
    else:
        read()
    return model, Served(
        name=name_of(args.folder),
        tokenizer=tokenizer,
        vocabulary=model.vocabulary,
        template=find_template(args.folder),
        defaults=defaults,
        max_length=args.max_length,
        most_samples=args.queue,  # a call of more would never be taken
        timeout=args.timeout,
        token_bytes=TokenBytes(tokenizer),
    )


def tensor_mesh(count: int):
    """Return a mesh of `count` devices over which the model is sharded, or None for one device. Raises UsageError if there are
    too few."""
    import jax

    if count > len(jax.devices()):
        raise UsageError(f"--tensor must be at most {len(jax.devices())}, the number of devices, got {count}")
    return None if count == 1 else jax.make_mesh((count,), ("tensor",), (jax.sharding.AxisType.Explicit,))


def read_key(file: Path | None) -> str | None:
    """Return the key of the file, or of the environment, or None. Raises UsageError for an empty one."""
    try:
        found = os.environ.get(KEY) if file is None else read_regular(file, 1 << 16)[1].decode()
    except (OSError, ValueError) as error:
        raise UsageError(f"--api-key-file cannot be read: {reason(error)}") from None
    if found is None:
        return None
    if not (found := found.strip()):
        raise UsageError(f"the key of {KEY if file is None else file} is empty: write one, or leave it out")
    if len(found.splitlines()) > 1:
        raise UsageError(f"the key of {KEY if file is None else file} must be one line, which a header can hold")
    return found


def bound(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address, before the model is loaded. Raises UsageError if that fails."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
        except OSError:
            listening.close()
            raise
    except (OSError, UnicodeError) as error:  # the second for a name that no domain can have
        raise UsageError(f"--host {host} and --port {port} cannot be listened at: {reason(error)}") from None
    return listening
