"""What leaves the memory of a pool for whose turn."""

from __future__ import annotations

from programs import SHARED, Driver, Times, pools_of, setup

from flowrl.schedule.events import Memory


def test_a_worker_that_never_leaves_needs_the_room_of_one_that_does():
    memory = {"gpu": Memory(0, {"actor.train": 60}, {"actor.generate": (), "actor.train": ("actor.train",)})}

    def program(driver: Driver, steps: int) -> None:
        for _ in driver.steps(steps):
            rows = driver.generate(residents=("actor.generate",))
            driver.call("reward.score", rows)  # works with nothing on the devices, so nobody leaves for it
            driver.call("actor.update", rows, reads=("actor",), updates="actor", residents=("actor.train",))
        driver.clock.end()

    times = {"actor.generate": 6, "actor.update": 3, "actor.train.swap": 0.25}
    driver = Driver(setup(SHARED, pools=("gpu", "cpu"), memory=memory), Times(times), pools_of(SHARED))
    program(driver, 3)
    moved = [s.title for s in driver.clock.flown.spans if "load" in s.title]
    assert moved == ["actor.train.onload", *["actor.train.offload", "actor.train.onload"] * 2]
    assert driver.clock.time == 3 * 9 + 5 * 0.25
