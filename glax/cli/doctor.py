"""Run `glax doctor`: print what is installed, on which devices JAX computes, and which kernels run here, or why not."""

import glob
import os
import sys

import jax

from glax._src.core.files import unwritable
from glax._src.core.known_miscompiles import version_of
from glax._src.core.recurrence import Recurrence
from glax._src.core.registry import Backend, KernelSpec, Platform, kernel_registry
from glax._src.kernels import load_kernels
from glax._src.solve.dispatch import executor
from glax._src.tuning.cache import NO_FOLDER
from glax._src.tuning.device import device_kind
from glax._version import __version__
from glax.cli.cache import measurements
from glax.cli.output import add_json, show_json, show_table
from glax.testing.cases import Case, recurrence

REQUIRED = ("jax", "jaxlib", "numpy", "jaxtyping", "filelock", "platformdirs")
OPTIONAL = ("flax", "optax", "rich", "matplotlib", "safetensors", "triton", "jax-triton", "jax-cuda12-plugin",
            "jax-cuda13-plugin", "libtpu", "torch", "fla-core", "ejkernel")  # fmt: skip
NEEDS = {Platform.TRITON: ("triton", "jax-triton")}  # packages that all kernels of a platform need
DEVICES = {  # device files on Linux: NVIDIA's and AMD's drivers, the driver of Windows Subsystem for Linux, Google's two drivers
    Backend.GPU: ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg"),
    Backend.TPU: ("/dev/accel*", "/dev/vfio/[0-9]*"),
}
JAX_FOR = {Backend.GPU: 'pip install "jax[cuda13]" (or cuda12)', Backend.TPU: 'pip install "jax[tpu]"'}


def add_parser(subparsers):
    parser = subparsers.add_parser(
        "doctor",
        help="show versions, devices, and which kernels run here or why not",
        description="Shows versions, devices, the cache of measurements, and every platform and kernel: usable, or the "
        "reason why not and what would help. Exit code 1 if no kernel is usable.",
    )
    add_json(parser)
    return parser


def run(args) -> int:
    load_kernels()
    calls, steps = probes(1024), probes(1)
    kernels = [kernel_state(spec, steps if spec.is_pooled else calls) for spec in kernel_registry.kernels.values()]
    report = dict(
        versions=dict(glax=__version__, python=sys.version.split()[0])
        | {name: version_of(name) for name in REQUIRED + OPTIONAL},
        backend=jax.default_backend(),
        devices=[dict(id=d.id, platform=d.platform, kind=d.device_kind) for d in jax.devices()],
        measured_as=device_kind(),
        cache=cache_state(),
        environment={name: value for name, value in sorted(os.environ.items()) if name.startswith("GLAX_")},
        policy=vars(executor.chain.policy),
        platforms=[platform_state(platform, kernels) for platform in Platform],
        kernels=kernels,
    )
    show_json(report) if args.json else show(report)
    return 0 if any(kernel["usable"] for kernel in kernels) else 1


def probes(T: int) -> dict[str, Recurrence]:
    """Return the calls that users make most: shapes with a per-key gate and with a per-head gate, in both dtypes of training."""
    cases = {
        f"{dtype}, per-{form} gate": Case("", gates=gates, dtype=dtype, B=1, T=T, heads=(4, 4, 4), K=64, V=64)
        for dtype in ("bfloat16", "float32")
        for form, gates in (("key", ("gk",)), ("head", ("g",)))
    }
    return {name: jax.eval_shape(lambda case=case: recurrence(case, "log-sigmoid")) for name, case in cases.items()}


def kernel_state(spec: KernelSpec, probes: dict[str, Recurrence]) -> dict:
    reasons = {name: spec.refusal(r) for name, r in probes.items()}
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    usable = len(refused) < len(probes)
    if not usable:
        reason = next(iter(refused.values()))
    else:
        reason = "; ".join(f"not with {name}: {reason}" for name, reason in refused.items()) or None
    return dict(
        name=spec.name, platform=str(spec.platform), usable=usable, reason=reason, fix=None if usable else fix(spec)
    )


def fix(spec: KernelSpec) -> str | None:
    """Return what the user can do where the machine is the obstacle. Other reasons of a kernel state the remedy themselves."""
    packages = [name for name in NEEDS.get(spec.platform, ()) if version_of(name) is None]
    missing = f"pip install {' '.join(packages)}" if packages else None
    if spec.backend in (Backend.here(), Backend.ANY):
        return missing
    chosen = os.environ.get("JAX_PLATFORMS")
    if spec.backend is Backend.CPU:
        return "JAX_PLATFORMS=cpu"
    steps = f"unset JAX_PLATFORMS, which is {chosen}" if chosen else JAX_FOR[spec.backend]
    steps += f"; {missing}" if missing else ""
    # On a machine without the device, no setting and no package makes its kernels run.
    return steps if present(spec.backend) else f"on a machine with a {str(spec.backend).upper()}: {steps}"


def present(backend: Backend) -> bool:
    """Return whether the system shows a device of that kind, which JAX may not have found."""
    return any(glob.glob(pattern) for pattern in DEVICES[backend])


def platform_state(platform: Platform, kernels: list[dict]) -> dict:
    own = [kernel for kernel in kernels if kernel["platform"] == platform]
    usable = [kernel for kernel in own if kernel["usable"]]
    if not own:
        return dict(name=str(platform), usable=False, reason="no kernels in this version", fix=None)
    if not usable:
        return dict(name=str(platform), usable=False, reason=own[0]["reason"], fix=own[0]["fix"])
    reason = None if len(usable) == len(own) else f"{len(usable)} of {len(own)} kernels"
    return dict(name=str(platform), usable=True, reason=reason, fix=None)


def cache_state() -> dict:
    persistent = measurements()
    folder, files = persistent.folder, list(persistent.files())
    return dict(
        folder=None if folder is None else str(folder),
        unwritable=NO_FOLDER if folder is None else unwritable(folder),
        files=len(files),
        entries=sum(len(content["entries"]) for _, content in files),
    )


def show(report: dict):
    show_table(
        ("package", "version"),
        [(name, version or "not installed") for name, version in report["versions"].items()],
    )
    kinds = ", ".join(f"{d['platform']}:{d['id']} {d['kind']}" for d in report["devices"])
    cache, policy = report["cache"], report["policy"]
    lines = [
        f"backend      {report['backend']}",
        f"devices      {kinds}",
        f"measured as  {report['measured_as']}",
        f"cache        {cache_text(cache)}",
        f"environment  {', '.join(f'{k}={v}' for k, v in report['environment'].items()) or 'no GLAX_ variable is set'}",
        f"tuning       {', '.join(f'{name}={value}' for name, value in policy.items())}",
    ]
    print(*lines, sep="\n")
    for what in ("platform", "kernel"):
        states = report[f"{what}s"]
        show_table((what, "usable", "reason", "fix"), [
            (s["name"], "yes" if s["usable"] else "no", s["reason"], s["fix"]) for s in states
        ])  # fmt: skip


def cache_text(cache: dict) -> str:
    if cache["folder"] is None:
        return cache["unwritable"]
    writable = f"not writable: {cache['unwritable']}" if cache["unwritable"] else "writable"
    return f"{cache['folder']}: {cache['entries']} measurements in {cache['files']} files, {writable}"
