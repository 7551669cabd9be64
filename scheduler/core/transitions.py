"""A request's states in the scheduler, and the table of what leads from one to the next.

The table is the only way to a state (``Request.advance``): a pair that is not in it is a bug. What is to be done at a
change is ``lifecycle``'s, what causes it ``core``'s and ``takeover``'s. README.md shows the table as it is drawn here.
"""

import enum


class State(enum.StrEnum):
    """Where a request is; NEW and SETTLED are seen within a step only."""

    NEW = "new"
    """Known by a message only; counted nowhere."""
    ADMITTED = "admitted"
    QUEUED = "queued"
    DISPATCHING = "dispatching"
    """Has its place on a worker; WORK has not confirmed it."""
    DISPATCHED = "dispatched"
    RUNNING = "running"
    """Its worker has told of a token."""
    ENDING = "ending"
    """An end of the present attempt was asked for; ATTEMPTS has not said which one is stored."""
    CLEARING = "clearing"
    """A stream's last attempt was lost; the next follows once its stream owner says that the caller saw nothing."""
    SETTLED = "settled"


class Trigger(enum.StrEnum):
    """What happened to a request, or was decided."""

    ADMITTED = "admitted"
    STORED = "stored"
    """REQUESTS holds it."""
    PLACED = "placed"
    """A worker has room, and WORK is asked to hold the attempt."""
    WORK_STORED = "work stored"
    GENERATING = "generating"
    """Its worker has told of the first token."""
    END_PROPOSED = "end proposed"
    LOST = "lost"
    """The attempt's stored end is lost, and its caller may have seen what nobody else knows of."""
    RETRIED = "retried"
    """The attempt's stored end is void, and another attempt follows."""
    ADOPTED = "adopted"
    """WORK holds an attempt that an earlier owner dispatched."""
    ENDED_BEFORE = "ended before"
    """ATTEMPTS holds an end of its last attempt that is older than this term."""
    SETTLED = "settled"
    """Its last end is stored, or its reservation has expired."""


WAITING = (State.ADMITTED, State.QUEUED, State.CLEARING)
"""States that count against queue limits."""

WITH_WORKER = (State.DISPATCHING, State.DISPATCHED, State.RUNNING)

TRANSITIONS: dict[tuple[State, Trigger], State] = {
    (State.NEW, Trigger.ADMITTED): State.ADMITTED,
    (State.NEW, Trigger.ADOPTED): State.DISPATCHED,
    (State.NEW, Trigger.ENDED_BEFORE): State.ENDING,
    (State.ADMITTED, Trigger.STORED): State.QUEUED,
    (State.ADMITTED, Trigger.ADOPTED): State.DISPATCHED,
    (State.ADMITTED, Trigger.END_PROPOSED): State.ENDING,
    (State.ADMITTED, Trigger.SETTLED): State.SETTLED,
    (State.QUEUED, Trigger.PLACED): State.DISPATCHING,
    (State.QUEUED, Trigger.LOST): State.CLEARING,
    (State.QUEUED, Trigger.ADOPTED): State.DISPATCHED,
    (State.QUEUED, Trigger.END_PROPOSED): State.ENDING,
    (State.QUEUED, Trigger.SETTLED): State.SETTLED,
    (State.DISPATCHING, Trigger.WORK_STORED): State.DISPATCHED,
    (State.DISPATCHING, Trigger.GENERATING): State.RUNNING,
    (State.DISPATCHING, Trigger.END_PROPOSED): State.ENDING,
    (State.DISPATCHING, Trigger.LOST): State.CLEARING,
    (State.DISPATCHING, Trigger.RETRIED): State.QUEUED,
    (State.DISPATCHING, Trigger.SETTLED): State.SETTLED,
    (State.DISPATCHED, Trigger.GENERATING): State.RUNNING,
    (State.DISPATCHED, Trigger.ADOPTED): State.DISPATCHED,
    (State.DISPATCHED, Trigger.END_PROPOSED): State.ENDING,
    (State.DISPATCHED, Trigger.LOST): State.CLEARING,
    (State.DISPATCHED, Trigger.RETRIED): State.QUEUED,
    (State.DISPATCHED, Trigger.SETTLED): State.SETTLED,
    (State.RUNNING, Trigger.WORK_STORED): State.RUNNING,
    (State.RUNNING, Trigger.ADOPTED): State.DISPATCHED,
    (State.RUNNING, Trigger.END_PROPOSED): State.ENDING,
    (State.RUNNING, Trigger.LOST): State.CLEARING,
    (State.RUNNING, Trigger.RETRIED): State.QUEUED,
    (State.RUNNING, Trigger.SETTLED): State.SETTLED,
    (State.ENDING, Trigger.ADOPTED): State.DISPATCHED,
    (State.ENDING, Trigger.LOST): State.CLEARING,
    (State.ENDING, Trigger.RETRIED): State.QUEUED,
    (State.ENDING, Trigger.SETTLED): State.SETTLED,
    (State.CLEARING, Trigger.RETRIED): State.QUEUED,
    (State.CLEARING, Trigger.ADOPTED): State.DISPATCHED,
    (State.CLEARING, Trigger.END_PROPOSED): State.ENDING,
    (State.CLEARING, Trigger.SETTLED): State.SETTLED,
}
"""(state, what happened) -> next state."""


class InvalidTransition(Exception):
    """An event that a request's state cannot have; carries the request's recent history."""


def mermaid() -> str:
    """The table as a mermaid state diagram."""
    lines = ["stateDiagram-v2"]
    for (state, trigger), following in TRANSITIONS.items():
        source = "[*]" if state is State.NEW else state
        target = "[*]" if following is State.SETTLED else following
        lines.append(f"    {source} --> {target}: {trigger}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(mermaid())
