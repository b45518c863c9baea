# SPDX-License-Identifier: Apache-2.0
"""The mistakes that the test doubles can make, and why each is always seen.

"Always" is argued from the simulator's deferred mode: an asynchronous copy takes at
least 1 ms and 25 ms on average, its destination holds poison meanwhile, and a stream
does one copy after the other. Where a reason speaks of host time, the host would have
to stand still for longer than a whole queue of copies to miss the mistake.
"""

# Standard
from dataclasses import dataclass
from enum import Enum

DIFFERS = "differs"
REFUSED = "refused"
CRASHED = "crashed"


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        scenario: The scenario that runs into it, by name.
        seen_as: ``differs`` (bytes are not equal), ``refused`` (an error is raised)
            or ``crashed`` (SIGSEGV).
        message: Part of the simulator's message, for a refusal.
        always: Why no run can miss it.
    """

    scenario: str
    seen_as: str
    always: str
    message: str = ""


class Bug(Enum):
    """A mistake of a test double; the right one makes none of them."""

    NO_WAIT_BEFORE_READ = Mistake(
        "store",
        DIFFERS,
        "the host reads a buffer microseconds after the copy was queued behind the "
        "forward's 16 copies",
    )
    EVENT_BEFORE_COPY = Mistake(
        "store",
        DIFFERS,
        "each wait ends when the copy it should cover begins: six times in a row the "
        "host would have to wake up later than that copy ends",
    )
    D2H_BUFFER_REUSED_EARLY = Mistake(
        "store",
        DIFFERS,
        "no timing: the event of a buffer is recorded anew, so the wait for it ends "
        "when the buffer holds another block",
    )
    WRONG_STREAM = Mistake(
        "store",
        DIFFERS,
        "the first copy ends after at most 50 ms and its block is the forward's 11th "
        "copy or later, about 280 ms away",
    )
    NO_WAIT_FOR_FORWARD = Mistake(
        "store",
        DIFFERS,
        "as for the wrong stream: the copy stream starts at once, the forward is at "
        "its first of 16 copies",
    )
    WAIT_FOR_WRONG_EVENT = Mistake(
        "store",
        DIFFERS,
        "the event of the step before is done already, so nothing is waited for",
    )
    WRONG_DEVICE = Mistake(
        "store",
        DIFFERS,
        "the event is recorded on an idle stream of the other NPU, so it is done "
        "while 16 copies of the forward are ahead of the first one",
    )
    SHARED_STAGING = Mistake(
        "two stores",
        DIFFERS,
        "no timing: both threads read the buffer after both copies into it are done "
        "(a barrier sees to it), and it holds the bytes of one of them",
    )
    PINNED_FREED_IN_FLIGHT = Mistake(
        "failed store",
        DIFFERS,
        "the next user fills the buffer microseconds after the failure, the copy into "
        "it is queued behind the forward's 16",
    )
    H2D_BUFFER_REUSED_EARLY = Mistake(
        "load",
        DIFFERS,
        "four refills take microseconds, the copies that read them are queued behind "
        "the forward's 16",
    )
    SCATTER_RETURNS_EARLY = Mistake(
        "direct load",
        DIFFERS,
        "the chunk is overwritten microseconds after the return, its copies are "
        "queued behind the forward's 16",
    )
    HOST_DEREFERENCE = Mistake(
        "addresses",
        CRASHED,
        "no timing: device addresses lie in a range without access",
    )
    COPY_PAST_END = Mistake(
        "addresses",
        REFUSED,
        "no timing: a copy is checked against its allocation",
        "run past the end of the allocation",
    )
    USE_AFTER_FREE = Mistake(
        "addresses",
        REFUSED,
        "no timing: freed ranges are remembered",
        "is stale: its allocation",
    )
    STALE_ADDRESS = Mistake(
        "addresses",
        REFUSED,
        "no timing: an allocation never gets the range that was freed last",
        "is stale: its allocation",
    )
    DOUBLE_FREE = Mistake(
        "addresses",
        REFUSED,
        "no timing: the second call finds the range among the freed ones",
        "is stale: its allocation",
    )
    OVERLAPPING_BATCH = Mistake(
        "addresses",
        REFUSED,
        "no timing: the destinations of a batch are compared before it starts",
        "two entries of the batch write the same bytes",
    )
    USED_AFTER_FORK = Mistake(
        "addresses",
        REFUSED,
        "no timing: the process that opened the NPU is known",
        "this process was forked from process",
    )

    @property
    def mistake(self) -> Mistake:
        """What it is."""
        return self.value
