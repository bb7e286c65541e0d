"""A program of the schedule in every order of events: the slow oracle of what cannot happen."""

from __future__ import annotations

import copy

from flowrl.schedule.events import Closed, Ended, Entered, Finished, Grouped, Issued, Opened, Publish, Stage, Start
from flowrl.schedule.machine import Machine


class Actions:
    """Stands in for a clock: keeps what a program does, which waits for nothing."""

    def __init__(self, setup):
        self.setup, self.done = setup, []

    def open(self, step):
        self.done.append(Opened(step))

    def issue(self, call):
        self.done.append(Issued(call))

    def close(self, step):
        self.done.append(Closed(step))

    def end(self):
        self.done.append(Ended())

    def wait_for(self, ids):
        self.done.append(tuple(ids))


def deadlocks(setup, actions, most=20_000):
    """The stories of all states in which nothing runs and the program is not over, and how many states there are."""
    start = Machine(setup)
    kept = {id(x): x for x in (setup, setup.memory, *setup.followers.values())}
    kept |= {id(a.call): a.call for a in actions if isinstance(a, Issued)}
    seen, found, todo = set(), [], [(0, start, frozenset())]
    while todo:
        place, machine, running = todo.pop()
        state = _state(place, machine, running)
        if state in seen:
            continue
        seen.add(state)
        assert len(seen) < most, "too large a program for this"
        last = {id for id, chunk in running if chunk < 0}  # whose groups have not all ended
        events = [
            Finished(id, chunk) if chunk >= 0 else Grouped(id, -1 - chunk)
            for id, chunk in sorted(running)
            if chunk < 0 or id not in last
        ]
        if place < len(actions) and _may_go_on(machine, actions[place]):
            events.append(actions[place])
        if not events and (place < len(actions) or not machine.idle):
            found.append(machine.story())
        for event in events:
            after, still = _copy(machine, kept), set(running)
            if isinstance(event, Finished):
                still.discard((event.id, event.chunk))
            elif isinstance(event, Grouped):
                still.discard((event.id, -1 - event.group))
            for command in () if isinstance(event, tuple) and not hasattr(event, "_fields") else after.handle(event):
                if isinstance(command, Start):
                    still.add((command.id, command.chunk))
                    if after._nodes[command.id].windowed:
                        still |= {(command.id, -1 - group) for group in range(after._nodes[command.id].call.groups)}
                elif isinstance(command, (Stage, Publish)):
                    still.add((command.id, 0))
            todo.append((place + (not isinstance(event, (Finished, Grouped))), after, frozenset(still)))
    return found, len(seen)


def _may_go_on(machine, action):
    if isinstance(action, Opened):
        return machine.may_open(action.step)
    return hasattr(action, "_fields") or not any(machine.pending(id) for id in action)


def _state(place, machine, running):
    nodes = sorted(
        (n.id, n.left, tuple(n.chunks_left), n.held, n.begun, tuple(sorted(n.done_chunks)))
        for n in machine._nodes.values()
    )
    copies = [(c.created, c.installed, c.dirty, len(c.waiting)) for c in machine._rules.copies.values()]
    window = machine._window and (tuple(machine._window._done), tuple(machine._window._taking), machine._window._head)
    return place, machine.committed, machine._open, tuple(nodes), tuple(copies), window, running


def _copy(machine, kept):
    handlers, machine._handlers = machine._handlers, {}
    after = copy.deepcopy(machine, dict(kept))
    machine._handlers = handlers
    after._handlers = {
        Opened: after._opened,
        Issued: lambda e: after._issued(e.call),
        Closed: after._close,
        Entered: after._has_entered,
        Grouped: after._grouped,
        Finished: after._has_finished,
        Ended: after._end,
    }
    return after
