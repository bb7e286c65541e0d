"""Which rank has which rows, as ranks go and come."""

from flowrl.runtime.distributed.rank_parts import RankParts


def test_each_rank_with_a_whole_model_is_a_copy_and_a_team_of_its_own():
    parts = RankParts((2, 3, 5), (0, 1, 2))
    assert parts.count == 3 and parts.keepers == (2, 3, 5)
    assert parts.copies == parts.teams == ((2,), (3,), (5,))
    assert parts.copy_with(3) == parts.team_of(3) == (3,) and parts.beside() == {}


def test_ranks_that_train_together_are_one_copy_whatever_rows_they_have():
    fsdp = RankParts((0, 1, 2, 3), (0, 1, 2, 3), size=4)
    assert fsdp.copies == ((0, 1, 2, 3),) and fsdp.copy_with(2) == (0, 1, 2, 3)
    assert fsdp.team_of(2) == (2,) and fsdp.count == 4 and fsdp.beside() == {}
    both = RankParts((0, 1, 2, 3), (0, 0, 1, 1), size=4)  # fsdp=2, tp=2
    assert both.keepers == (0, 2) and both.team_of(1) == (0, 1) and both.copy_with(1) == (0, 1, 2, 3)


def test_replicas_of_two_ranks_go_and_come_whole():
    parts = RankParts((4, 5, 6, 7), (0, 0, 1, 1), size=2)
    assert parts.copies == ((4, 5), (6, 7)) and parts.beside() == {4: (5,), 6: (7,)}
    left = parts.without({4, 5})
    assert left.ranks == (6, 7) and left.shares == (0, 0) and left.copies == ((6, 7),)
    assert left.copy_with(5) == (5,)  # it is not there any more
    back = left.on([*left.ranks, 8, 9])
    assert back.shares == (0, 0, 1, 1) and back.teams == ((6, 7), (8, 9)) and back.copy_with(9) == (8, 9)


def test_ranks_that_come_to_whole_models_have_parts_of_their_own():
    parts = RankParts((0,), (0,)).on([0, 4, 6])
    assert parts.shares == (0, 1, 2) and parts.without({4}).shares == (0, 1)


def test_a_part_of_the_ranks_is_numbered_from_the_start():
    parts = RankParts((0, 1, 2, 3), (0, 1, 2, 3), size=4).on((2, 3))
    assert parts.ranks == (2, 3) and parts.shares == (0, 1) and parts.count == 2
