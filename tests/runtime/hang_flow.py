"""A run that comes to a standstill in its second step: in a function that never returns, or a process that is stopped."""

from __future__ import annotations

import os
import signal
import threading

from small_flow import Counter, Numbers

import flowrl as fl

flow = fl.Flow("hang")


class Judge(fl.Worker):
    @fl.op(reads="y", adds="r: f32[]", cost="external")
    def judge(self, batch, *, how: str = "never"):
        if batch.keys[0][0] >= 4 and how == "never":
            threading.Event().wait()
        if batch.keys[0][0] >= 4 and how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        return {"r": batch.y.values * 2}


judge = flow.worker(Judge)
counter = flow.worker(Counter)


@flow.program
def hang(steps: int = 4, how: str = "never"):
    for step, batch in flow.steps(Numbers(), steps):
        batch = judge.judge(counter.values(batch), how=how)
        metrics = counter.update(batch)
        flow.log(step, metrics, reward=batch.r.mean())


if __name__ == "__main__":
    flow.main()
