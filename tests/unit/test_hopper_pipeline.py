"""Who waits for whom in the Hopper kernels: the tables in their files are those of the declared pipelines."""

import textwrap

import pytest

from glax._src.kernels.pallas_gpu.device.pipeline import Handoff, Meeting, Ring
from glax._src.kernels.pallas_gpu.plan import Scan
from glax._src.kernels.pallas_gpu.scan import head

pytestmark = pytest.mark.fast
OUTPUTS = Scan(H=2, K=128, V=128)
# The module, a pipeline of it, and the roles of its warpgroups.
TABLES = {
    "head_scan": (head, head.HeadPipeline.planned(OUTPUTS), head.roles_of(OUTPUTS)),
    "pair_scan": (head, head.HeadPipeline.planned(OUTPUTS, heads=2), head.roles_of(OUTPUTS)),
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
