# SPDX-License-Identifier: Apache-2.0
"""The mistakes that the test doubles can make, and why each is seen in every run.

The runs are in deferred mode with the schedule *latest*: a queued copy runs when
something waits for it, its destination holds poison from the submission on, and its
source is read when it runs. No reason is one of time.
"""

# Standard
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        scenario: The scenario that runs into it, by name.
        always: Why no run misses it.
    """

    scenario: str
    always: str


class Bug(Enum):
    """A mistake of a test double; the right one makes none of them."""

    NO_WAIT_BEFORE_READ = Mistake(
        "store",
        "nothing waits for the copy, so the buffer holds poison",
    )
    EVENT_BEFORE_COPY = Mistake(
        "store",
        "the wait runs what is before the copy, so the buffer holds poison",
    )
    D2H_BUFFER_REUSED_EARLY = Mistake(
        "store",
        "the event of a buffer is recorded anew, so the wait for it ends when the "
        "buffer holds another block",
    )
    WRONG_STREAM = Mistake(
        "store",
        "the wait runs the copies and not the forward, whose destination holds poison",
    )
    NO_WAIT_FOR_FORWARD = Mistake(
        "store",
        "as for the wrong stream: nothing makes the forward run",
    )
    WAIT_FOR_WRONG_EVENT = Mistake(
        "store",
        "as for the wrong stream: the event of the step before is done already",
    )
    WRONG_DEVICE = Mistake(
        "store",
        "the event is recorded on an idle stream of the other NPU, so it is done and "
        "nothing makes the copies run",
    )
    SHARED_STAGING = Mistake(
        "two_stores",
        "both threads read the buffer after both copies into it are done (a barrier "
        "sees to it), and it holds the bytes of one of them",
    )
    PINNED_FREED_IN_FLIGHT = Mistake(
        "failed_store",
        "the copy into the buffer runs after its next user has filled it",
    )
    H2D_BUFFER_REUSED_EARLY = Mistake(
        "load",
        "the copies run after the last refill and all read that",
    )
    SCATTER_RETURNS_EARLY = Mistake(
        "direct_load",
        "the copies run after the chunk was overwritten",
    )
    OTHER_THREADS_EVENT = Mistake(
        "two_stores",
        "what the other thread waits for runs, and not the copies of this one, so its "
        "buffers hold poison",
    )
    STAGING_GIVEN_BACK_EARLY = Mistake(
        "pooled_loads",
        "the last copies from the buffers run after the next load has filled them",
    )
    SOURCE_OVERWRITTEN = Mistake(
        "overtaken_store",
        "the next forward is waited for first and runs before the copies of the blocks "
        "that it overwrites",
    )
    PRIVATE_STREAM_ALONE = Mistake(
        "private_store",
        "the wait for the private stream runs the copies and not the forward on the "
        "caller's, whose destination holds poison",
    )
    ERROR_TAKEN = Mistake(
        "failing_store",
        "the copy runs, and fails, while another thread waits for the shared stream; "
        "what is queued later is free of the failure, the block is half poison",
    )

    @property
    def mistake(self) -> Mistake:
        """What it is."""
        return self.value
