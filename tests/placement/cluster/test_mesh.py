"""Meshes: named axes, ranks and coordinates, groups, and what is no mesh."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import PlanError
from flowrl.placement.cluster.mesh import AXES, Mesh

meshes = st.dictionaries(st.sampled_from(AXES), st.integers(1, 4), max_size=4).map(
    lambda axes: Mesh({str(a): n for a, n in axes.items()})
)


def test_axes_of_size_1_are_left_out_and_the_order_is_one():
    mesh = Mesh({"tp": 2, "pp": 1, "fsdp": 4})
    assert mesh == Mesh({"fsdp": 4, "tp": 2}) and hash(mesh) == hash(Mesh.of("tp=2,fsdp=4"))
    assert list(mesh.axes.items()) == [("fsdp", 4), ("tp", 2)]
    assert (str(mesh), mesh.size, mesh.data, mesh["tp"], mesh["pp"]) == ("fsdp=4,tp=2", 8, 4, 2, 1)
    assert str(Mesh()) == "1" and Mesh.of("") == Mesh() == Mesh.of(" tp=1 ,")


def test_rows_are_split_over_some_axes_only():
    assert Mesh.of("dp=2,fsdp=3,ep=2,tp=4,pp=2,cp=2").data == 12


def test_neighbours_differ_in_tp_and_groups_say_so():
    mesh = Mesh.of("pp=2,dp=2,tp=2")
    assert [mesh.coordinates(r) for r in (0, 1, 4)] == [
        {"pp": 0, "dp": 0, "tp": 0},
        {"pp": 0, "dp": 0, "tp": 1},
        {"pp": 1, "dp": 0, "tp": 0},
    ]
    assert list(mesh.groups("tp")) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert list(mesh.groups("pp")) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert list(mesh.groups("dp", "tp")) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert list(mesh.groups("cp")) == [(r,) for r in range(8)]


@given(meshes)
def test_ranks_and_coordinates_are_the_same_thing(mesh):
    assert [mesh.rank(mesh.coordinates(r)) for r in range(mesh.size)] == list(range(mesh.size))
    assert Mesh.of(str(mesh) if mesh.axes else "") == mesh


@given(meshes, st.sets(st.sampled_from(AXES)))
def test_groups_share_out_all_ranks(mesh, axes):
    groups = list(mesh.groups(*axes))
    assert sorted(r for g in groups for r in g) == list(range(mesh.size))
    size = Mesh({a: mesh[a] for a in axes}).size
    assert all(len(g) == size for g in groups)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Mesh({"fdsp": 4}),
            "a mesh has no axis 'fdsp'.\n  have cp, dp, ep, folded_ep, fsdp, pp, tp\n  fix  Did you mean 'fsdp'?",
        ),
        (lambda: Mesh({"tp": 0}), "axis tp=0: a mesh has at least one device along each axis."),
        (lambda: Mesh.of("tp"), "'tp' is no axis of a mesh.\n  fix  Write axes with sizes: tp=8,pp=4,dp=4."),
        (lambda: Mesh.of("tp=-2"), "'tp=-2' is no axis of a mesh.\n  fix  Write axes with sizes: tp=8,pp=4,dp=4."),
        (lambda: Mesh.of("tp=2,tp=4"), "axis 'tp' is there twice in 'tp=2,tp=4'."),
    ],
)
def test_what_is_no_mesh(make, message):
    with pytest.raises(PlanError) as found:
        make()
    assert str(found.value) == message


# folded experts


def test_experts_fold_over_the_ranks_of_a_stage():
    mesh = Mesh.of("pp=8,dp=4,tp=4,folded_ep=16")
    assert (mesh.size, mesh.data, str(mesh.experts)) == (128, 4, "pp=8,ep=16")
    assert mesh != Mesh.of("pp=8,dp=4,tp=4") and mesh == Mesh(mesh.said) and Mesh.of(str(mesh)) == mesh
    assert hash(mesh) == hash(Mesh(mesh.said)) and Mesh.of("dp=4,folded_ep=1") == Mesh.of("dp=4")
    plain = Mesh.of("dp=4,ep=2")
    assert plain.experts is plain


@pytest.mark.parametrize(
    "text,words",
    [
        ("dp=4,tp=4,folded_ep=3", "folded_ep=3 does not divide the 16 ranks that dp, cp and tp have in a stage"),
        ("dp=2,ep=2,folded_ep=2", "folded_ep=2 or ep=2, not both"),
        ("fsdp=4,tp=2,folded_ep=2", "folded_ep=2 or fsdp=4, not both"),
        ("folded_ep=2", "does not divide the 1 ranks"),
    ],
)
def test_experts_that_do_not_fold(text, words):
    with pytest.raises(PlanError, match=words):
        Mesh.of(text)
