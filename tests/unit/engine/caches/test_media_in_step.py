"""Whatever is sent, evicted, trimmed, aborted or restarted, both sides hold the same media.

Tests ``caches/receiver.py`` and ``caches/sender.py``.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from plimsoll_engine.caches.receiver import MediaCacheReceiver
from plimsoll_engine.caches.sender import MediaCacheSender
from plimsoll_engine.frontend.workers.outbox import Outbox
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.messages.framing import LENGTH_PREFIX

CAPACITY = 10
# Each image has one size; the last is larger than the whole cache.
SIZES = (1, 2, 3, 4, 5, 0, 11)
IMAGES = st.lists(st.integers(0, len(SIZES) - 1), max_size=4)


def content(image: int) -> bytes:
    return bytes([image]) * SIZES[image]


def media(image: int) -> worker_ipc.Media:
    return worker_ipc.Media(
        "image", b"key%d" % image, 0, 1, 1, [SIZES[image]], "uint8", content(image)
    )


def submit(name: str, images: list[int]) -> worker_ipc.Submit:
    return worker_ipc.Submit(
        name, [1], worker_ipc.Sampling(max_tokens=1), media=[media(i) for i in images]
    )


class Link(RuleBasedStateMachine):
    """A frontend's outbox and sender, a socket that holds frames, a worker's receiver."""

    receiver_type: type[MediaCacheReceiver] = MediaCacheReceiver

    def __init__(self) -> None:
        super().__init__()
        self.images: dict[str, list[int]] = {}
        self.count = 0
        self.start_worker()

    def start_worker(self) -> None:
        self.sender = MediaCacheSender(CAPACITY)
        self.receiver = self.receiver_type(CAPACITY)
        self.outbox = Outbox()
        self.socket: deque[bytes] = deque()

    @rule(images=IMAGES)
    def request(self, images: list[int]) -> None:
        self.count += 1
        name = f"r{self.count}"
        self.images[name] = images
        self.outbox.put(submit(name, images))

    @precondition(lambda self: self.images)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        self.outbox.put(worker_ipc.Abort(data.draw(st.sampled_from(sorted(self.images)))))

    @rule()
    def trim(self) -> None:
        self.outbox.put(worker_ipc.Trim("t"))

    @rule()
    def write(self) -> None:
        message = self.outbox.take()
        if message is not None:
            self.socket.append(
                worker_ipc.encode_frame(self.sender.omit_cached_media(message))[
                    LENGTH_PREFIX.size :
                ]
            )

    @precondition(lambda self: self.socket)
    @rule()
    def read(self) -> None:
        message = worker_ipc.to_worker_decoder.decode(self.socket.popleft())
        if isinstance(message, worker_ipc.Trim):
            self.receiver.clear()
        if not isinstance(message, worker_ipc.Submit):
            return
        whole = self.receiver.restore_cached_media(message)
        assert isinstance(whole, worker_ipc.Submit), whole
        assert [one.data for one in whole.media] == [
            content(image) for image in self.images[message.request_id]
        ]

    @rule()
    def restart(self) -> None:
        """Everything on the way is lost; running requests are sent again, with all their media."""
        self.start_worker()
        for name, images in self.images.items():
            self.outbox.put(submit(name, images))

    @invariant()
    def bounded(self) -> None:
        assert self.sender.find_problems() == []
        assert self.receiver.bytes <= CAPACITY

    @invariant()
    def in_step(self) -> None:
        if not self.socket:
            assert self.sender.list_keys() == set(self.receiver.list_keys())

    def teardown(self) -> None:
        while len(self.outbox):
            self.write()
        while self.socket:
            self.read()
        self.in_step()


def test_sender_and_receiver_stay_in_step() -> None:
    run_state_machine_as_test(Link, settings=settings(max_examples=100, deadline=None))


def test_a_receiver_that_evicts_for_itself_is_caught() -> None:
    """The real bug put back: two caches, each with an order of its own."""

    class Selfish(MediaCacheReceiver):
        def restore_cached_media(
            self, submit: worker_ipc.Submit
        ) -> worker_ipc.Submit | worker_ipc.MissingMedia:
            whole = super().restore_cached_media(submit)
            while len(self) > 2:
                self._remove(self.list_keys()[0])
            return whole

    class SelfishLink(Link):
        receiver_type = Selfish

    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            SelfishLink,
            settings=settings(
                max_examples=200,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                report_multiple_bugs=False,
            ),
        )


def test_what_the_worker_lacks_is_sent_again() -> None:
    sender, receiver = MediaCacheSender(CAPACITY), MediaCacheReceiver(CAPACITY)
    first = sender.omit_cached_media(submit("a", [1, 2]))
    assert isinstance(first, worker_ipc.Submit)
    receiver.restore_cached_media(first)
    receiver.clear()  # as no worker of ours does on its own
    second = sender.omit_cached_media(submit("b", [2]))
    assert isinstance(second, worker_ipc.Submit)
    missing = receiver.restore_cached_media(second)
    assert missing == worker_ipc.MissingMedia("b", 0, [b"key2"])
    sender.mark_missing(missing.keys)
    again = sender.omit_cached_media(submit("b", [2]))
    assert isinstance(again, worker_ipc.Submit)
    assert isinstance(receiver.restore_cached_media(again), worker_ipc.Submit)


def test_an_item_is_sent_once() -> None:
    sender = MediaCacheSender(CAPACITY)
    sender.omit_cached_media(submit("a", [3, 3]))
    sender.omit_cached_media(submit("b", [3]))
    assert (sender.sent_bytes_total, sender.spared_bytes_total) == (4, 8)


def test_media_of_one_request_never_push_each_other_out() -> None:
    sender, receiver = MediaCacheSender(CAPACITY), MediaCacheReceiver(CAPACITY)
    for number, images in enumerate(([3, 4], [3, 2, 4, 1])):
        packed = sender.omit_cached_media(submit(f"r{number}", images))
        assert isinstance(packed, worker_ipc.Submit)
        whole = receiver.restore_cached_media(packed)
        assert isinstance(whole, worker_ipc.Submit)
        assert [one.data for one in whole.media] == [content(image) for image in images]
