"""Who waits for whom in the Hopper kernels: the tables in their files are those of the declared pipelines."""

import textwrap

import pytest

from glax._src.kernels.pallas_gpu.chunks import inverse, pairs
from glax._src.kernels.pallas_gpu.device.launch import ALONE
from glax._src.kernels.pallas_gpu.device.pipeline import Handoff, Meeting, Ring, acting_as
from glax._src.kernels.pallas_gpu.gradient import delta, delta_key, exact, head_group, items, key, wide
from glax._src.kernels.pallas_gpu.gradient import head as gradient_head
from glax._src.kernels.pallas_gpu.plan import Blocks, Scan
from glax._src.kernels.pallas_gpu.scan import delta as delta_scan
from glax._src.kernels.pallas_gpu.scan import delta_key as delta_key_scan
from glax._src.kernels.pallas_gpu.scan import exact as exact_scan
from glax._src.kernels.pallas_gpu.scan import head, segments
from glax._src.kernels.pallas_gpu.scan import key as key_scan

pytestmark = pytest.mark.fast
OUTPUTS = Scan(H=2, K=128, V=128, in_memory=(128, 128))


def of_delta(module, pipeline, plan, kind, K, **options):
    """Return the module, pipeline and roles of a scan under the delta rule."""
    w = plan(kind, H=2, K=K, V=128, reverse=False, start=False, **options)
    return module, pipeline.planned(w), w.roles


# The module, a pipeline of it, and the roles of its warpgroups.
TABLES = {
    "exact_outputs": (exact_scan, exact_scan.ExactPipeline.planned(OUTPUTS), ALONE),
    "lookback_tables": (segments, segments.LookbackPipeline.planned(OUTPUTS), ALONE),
    "key_scan": (key_scan, key_scan.KeyPipeline.planned(OUTPUTS), key_scan.roles_of(OUTPUTS)),
    "head_scan": (head, head.HeadPipeline.planned(OUTPUTS), head.roles_of(OUTPUTS)),
    "pair_scan": (head, head.HeadPipeline.planned(OUTPUTS, heads=2), head.roles_of(OUTPUTS)),
    "delta_residuals": of_delta(delta_scan, delta_scan.DeltaPipeline, delta_scan.DeltaScan, "residuals", 128),
    "delta_residuals, together": of_delta(
        delta_scan, delta_scan.DeltaPipeline, delta_scan.DeltaScan, "residuals", 128, together=True
    ),
    "delta_adjoint": of_delta(delta_scan, delta_scan.DeltaPipeline, delta_scan.DeltaScan, "adjoint", 128),
    "delta_adjoint, wide": of_delta(delta_scan, delta_scan.DeltaPipeline, delta_scan.DeltaScan, "adjoint", 256),
    "delta_inverse": (inverse, inverse.InversePipeline.planned(128), dict(compute=4)),
    "delta_key_pairs": (pairs, pairs.PairsPipeline.planned(), dict(compute=1)),
    "delta_key_residuals": of_delta(
        delta_key_scan, delta_key_scan.DeltaKeyPipeline, delta_key_scan.DeltaKeyScan, "residuals", 128
    ),
    "delta_key_adjoint": of_delta(
        delta_key_scan, delta_key_scan.DeltaKeyPipeline, delta_key_scan.DeltaKeyScan, "adjoint", 128
    ),
}
CHUNKS = items.Items(1, 128, 2, (128, 128), (1, 1, 1), 1, False, terms=2, resets=True)
RUNS = items.Items(1, 128, 2, (128, 128), (1, 1, 1), 1, False, run=2)
GROUPS = head_group.HeadGroups(1, 128, 2, (128, 128), (1, 1, 2), 1, False, run=2, members=2)
WIDE = wide.WideItems(1, 128, 2, (128, 128), (1, 1, 2), 1, False, Blocks(1, 2), terms=2, summed=2, resets=True)
TABLES |= {
    "gradient_key": (key, key.KeyPipeline.planned(CHUNKS), items.ROLES),
    "gradient_exact": (exact, exact.ExactPipeline.planned(CHUNKS), ALONE),
    "gradient_wide": (wide, wide.WidePipeline.planned(WIDE), wide.ROLES),
    "gradient_head": (gradient_head, gradient_head.HeadPipeline.planned(RUNS), items.ROLES),
    "gradient_groups": (head_group, head_group.GroupsPipeline.planned(GROUPS), head_group.ROLES),
    "delta_gradient": (delta, delta.DeltaPipeline.planned(is_wide=False), delta.ROLES),
    "delta_gradient_wide": (delta, delta.DeltaPipeline.planned(is_wide=True), delta.ROLES),
    "delta_key_gradient": (delta_key, delta_key.DeltaKeyPipeline.planned(), delta_key.ROLES),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_table_of_a_kernel_is_that_of_its_pipeline(name):
    module, pipeline, roles = TABLES[name]
    table = textwrap.indent(pipeline.table(roles), "    ")
    assert table in module.__doc__, f"{module.__name__} should have\n{table}"


def test_arrivals_follow_from_roles():
    ring = Ring(3, ("load",), ("carry", "output"), ("k", "v"))
    roles = dict(output=1, carry=2, load=1)
    assert {end: x.num_arrivals for end, x in ring.barriers(roles).items()} == dict(full=2, free=3)
    stored = Ring(2, ("carry",), ("output",), released_by=())
    assert {end: x.num_arrivals for end, x in stored.barriers(roles).items()} == dict(full=2)
    assert [x.num_arrivals for x in Handoff(("carry",), ("output",)).barriers(roles).values()] == [2, 1]
    assert [x.num_arrivals for x in Meeting(("carry", "load")).barriers(roles).values()] == [3]
    apart = Ring(4, ("load",), ("compute",), teams=2)
    assert {end: x.num_arrivals for end, x in apart.barriers(items.ROLES).items()} == dict(full=1, free=1)
    assert [x.num_arrivals for x in Meeting(("compute",), teams=2).barriers(items.ROLES).values()] == [1]


def test_a_role_does_only_what_is_declared_of_it():
    ring, handoff = Ring(3, ("load",), ("carry",), ("k",)), Handoff(("load",), ("carry",))
    with acting_as("output"), pytest.raises(ValueError, match=r"'output' must not read a slot.*declares it for carry"):
        ring.wait(0)
    with acting_as("carry"), pytest.raises(ValueError, match=r"'carry' must not store the tile.*for load"):
        handoff.stored()
