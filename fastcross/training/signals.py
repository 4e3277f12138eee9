"""SIGINT and SIGTERM end a training between two steps."""

import contextlib
import signal
from collections.abc import Iterator


class Signals:
    """Truthy once SIGINT or SIGTERM has arrived."""

    received = False

    def __bool__(self) -> bool:
        return self.received


@contextlib.contextmanager
def stop_signals() -> Iterator[Signals]:
    """The first SIGINT or SIGTERM sets a flag, so that a step is never torn; a second one acts as usual."""
    signals = Signals()
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def receive(number: int, frame: object) -> None:
        signals.received = True
        restore()

    try:
        for number in previous:
            signal.signal(number, receive)
    except ValueError:  # not the main thread, where Python allows no handlers
        yield signals
        return
    try:
        yield signals
    finally:
        restore()
