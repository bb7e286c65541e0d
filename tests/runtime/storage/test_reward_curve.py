"""The lines of a reward curve."""

from flowrl.runtime.storage.reward_curve import curves


def test_each_loop_of_a_program_is_a_line_of_its_own():
    def lines(program, *rewards):
        return [{"program": program, "step": step, "reward": reward} for step, reward in enumerate(rewards)]

    history = [
        *lines("warmup", 0.1),
        *lines("train", 0.1, 0.2),
        *lines("train", 0.3, 0.4, 0.5),
        *lines("test", 0.9, 1.0),
    ]
    assert curves(history) == [
        ("train, loop 1", [0, 1], [0.1, 0.2]),
        ("train, loop 2", [0, 1, 2], [0.3, 0.4, 0.5]),
        ("test", [0, 1], [0.9, 1.0]),
    ]


def test_a_step_without_a_reward_is_left_out_also_before_it_was_written_and_read_again():
    rewards = (0.5, float("nan"), None, 0.75)
    history = [{"program": "train", "step": step, "reward": reward} for step, reward in enumerate(rewards)]
    assert curves([*history, {"program": "train", "step": 4}]) == [("train", [0, 3], [0.5, 0.75])]
