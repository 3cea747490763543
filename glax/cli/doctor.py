"""Run `glax doctor`: print what is installed, on which devices JAX computes, and which kernels run here, or why not."""

import glob
import os
import sys

import jax

from glax._src.core.files import unwritable
from glax._src.core.known_miscompiles import known_slowdown, version_of
from glax._src.core.recurrence import Recurrence
from glax._src.core.registry import Backend, KernelSpec, Platform, kernel_registry
from glax._src.kernels import load_kernels
from glax._src.solve.dispatch import executor
from glax._src.tuning.cache import NO_FOLDER
from glax._src.tuning.device import device_kind
from glax._version import __version__
from glax.cli.cache import measurements
from glax.cli.output import show_json, show_text
from glax.testing.cases import Case, recurrence

REQUIRED = ("jax", "jaxlib", "numpy", "jaxtyping", "filelock", "platformdirs", "rich", "shtab")
OPTIONAL = ("flax", "optax", "matplotlib", "safetensors", "triton", "jax-triton", "jax-cuda12-plugin",
            "jax-cuda13-plugin", "libtpu", "torch", "fla-core", "mamba-ssm", "jax-linear-attention", "ejkernel")  # fmt: skip
NEEDS = {Platform.TRITON: ("triton", "jax-triton")}  # packages that all kernels of a platform need
DEVICES = {  # device files on Linux: NVIDIA's driver, the driver of Windows Subsystem for Linux, Google's two drivers
    Backend.GPU: ("/dev/nvidia[0-9]*", "/dev/dxg"),
    Backend.TPU: ("/dev/accel*", "/dev/vfio/[0-9]*"),
}
JAX_FOR = {Backend.GPU: 'pip install "jax[cuda13]" (or cuda12)', Backend.TPU: 'pip install "jax[tpu]"'}


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
        kernels=kernels,
    )
    report = dict(verdict=verdict(report)) | report
    show_json(report) if args.json else show(report)
    return 0 if any(kernel["usable"] for kernel in kernels) else 1


def probes(T: int) -> dict[str, Recurrence]:
    """Return the calls that users make most, by name, with T tokens: per-key gates, per-head gates, and the delta rule, in both
    dtypes of training."""
    calls = {"per-key gate": (("gk",), ()), "per-head gate": (("g",), ()), "delta rule": (("g",), ("beta",))}
    cases = {
        f"{dtype}, {name}": Case("", gates=gates, erasure=erasure, dtype=dtype, B=1, T=T, heads=(4, 4, 4), K=64, V=64)
        for dtype in ("bfloat16", "float32")
        for name, (gates, erasure) in calls.items()
    }
    return {name: jax.eval_shape(lambda case=case: recurrence(case, "log-sigmoid")) for name, case in cases.items()}


def kernel_state(spec: KernelSpec, probes: dict[str, Recurrence]) -> dict:
    """Return what is known of a kernel: whether it runs any of the calls `probes`, why not others, and what helps."""
    refused: dict[str, list[str]] = {}  # calls by the reason
    for name, r in probes.items():
        if (why := spec.refusal(r)) is not None:
            refused.setdefault(why, []).append(name)
    usable = sum(map(len, refused.values())) < len(probes)
    limits = "; ".join(f"not with {' or '.join(shortened(names))}: {why}" for why, names in refused.items())
    reason = (limits or None) if usable else next(iter(refused))
    return dict(
        name=spec.name, platform=str(spec.platform), usable=usable, reason=reason, fix=None if usable else fix(spec)
    )


def shortened(calls: list[str]) -> list[str]:
    """Return the names of calls, without the dtype for calls that are in the list in both dtypes: "per-key gate" for "float32,
    per-key gate"."""
    names = [call.split(", ")[1] for call in calls]
    return list(
        dict.fromkeys(call if names.count(name) == 1 else name for call, name in zip(calls, names, strict=True))
    )


def fix(spec: KernelSpec) -> str | None:
    """Return what the user can do if this machine is the reason why a kernel does not run, else None. Other reasons state the
    remedy themselves."""
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
    """Return whether the system shows a device of that kind, whether or not JAX has found it."""
    return any(glob.glob(pattern) for pattern in DEVICES[backend])


def cache_state() -> dict:
    """Return the folder of measurements, why it cannot be written, and the numbers of files and entries."""
    persistent = measurements()
    folder, files = persistent.folder, list(persistent.files())
    return dict(
        folder=None if folder is None else str(folder),
        unwritable=NO_FOLDER if folder is None else unwritable(folder),
        files=len(files),
        entries=sum(len(content["entries"]) for _, content in files),
    )


def verdict(report: dict) -> list[str]:
    """Return three lines: whether glax works here, which kernels run, and what this machine could run and does not."""
    versions, kernels = report["versions"], report["kernels"]
    usable = [kernel for kernel in kernels if kernel["usable"]]
    kinds = ", ".join(dict.fromkeys(device["kind"] for device in report["devices"]))
    platforms = dict.fromkeys(kernel["platform"] for kernel in usable)
    return [
        f"{'Ready' if usable else 'NOT READY'}: glax {versions['glax']} and JAX {versions['jax']} compute on {kinds}.",
        f"Kernels: {len(usable)} of {len(kernels)} run here, those of {' and '.join(platforms) or 'no platform'}.",
        lost(report),
    ]


def lost(report: dict) -> str:
    """Return a line that says what this machine could run and does not."""
    unused = [backend for backend in JAX_FOR if backend is not Backend.here() and present(backend)]
    if unused:
        return f"Lost: this machine's {str(unused[0]).upper()}, which JAX does not use. What helps is below."
    here = {spec.name for spec in kernel_registry.kernels.values() if spec.backend in (Backend.here(), Backend.ANY)}
    lacking = [k for k in report["kernels"] if k["name"] in here and not k["usable"]]
    platforms = dict.fromkeys(k["platform"] for k in lacking if "install" in f"{k['reason']} {k['fix']}")
    if platforms:
        named = " and ".join(platforms).replace("cpp", "cpp (native code)")
        return f"Lost: the kernels of {named}; others run in their place. What helps is below."
    if (slowdown := known_slowdown()) is not None:
        return f"Slower: Hopper's kernels. {slowdown}."
    return "Nothing is lost: all kernels for this machine run."


def show(report: dict):
    print(*report["verdict"], sep="\n")
    print("\nRun here:")
    for platform in dict.fromkeys(kernel["platform"] for kernel in report["kernels"] if kernel["usable"]):
        own = [k for k in report["kernels"] if k["usable"] and k["platform"] == platform]
        show_text(", ".join(k["name"] for k in own), indent=2)
    for reason, names in grouped(report["kernels"], usable=True).items():
        if reason[0] is not None:
            show_text(f"{', '.join(names)}: {reason[0]}", indent=4)
    print("\nDo not run here:")
    for (reason, remedy), names in grouped(report["kernels"], usable=False).items():
        show_text(", ".join(names), indent=2)
        show_text(reason, indent=4)
        if remedy is not None:
            show_text(f"remedy: {remedy}", indent=4)
    print()
    versions = {True: [], False: []}
    for name, version in report["versions"].items():
        versions[version is not None].append(name if version is None else f"{name} {version}")
    kinds = ", ".join(f"{d['platform']}:{d['id']} {d['kind']}" for d in report["devices"])
    for heading, text in {
        "installed": ", ".join(versions[True]),
        "not installed": ", ".join(versions[False]) or "-",
        "backend": report["backend"],
        "devices": kinds,
        "measured as": report["measured_as"],
        "cache": cache_text(report["cache"]),
        "environment": ", ".join(f"{k}={v}" for k, v in report["environment"].items()) or "no GLAX_ variable is set",
        "tuning": ", ".join(f"{name}={value}" for name, value in report["policy"].items()),
    }.items():
        show_text(f"{heading}: {text}")


def grouped(kernels: list[dict], usable: bool) -> dict[tuple, list[str]]:
    """Return {(reason, remedy): names} of the kernels for which "usable" is `usable`."""
    found: dict[tuple, list[str]] = {}
    for kernel in kernels:
        if kernel["usable"] is usable:
            found.setdefault((kernel["reason"], kernel["fix"]), []).append(kernel["name"])
    return found


def cache_text(cache: dict) -> str:
    if cache["folder"] is None:
        return cache["unwritable"]
    writable = f"not writable: {cache['unwritable']}" if cache["unwritable"] else "writable"
    return f"{cache['folder']}: {cache['entries']} measurements in {cache['files']} files, {writable}"
