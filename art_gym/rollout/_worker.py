"""The worker: a process that holds one environment and answers calls on it, one after the other, over a socket.

It limits itself (memory, processor time of an episode) and knows nothing of episodes otherwise. Who started it ends it: by closing the socket,
or by force.

A frame is its length in 8 bytes and a packed call or outcome; an empty frame asks for the end, once the environment is closed.
"""

from __future__ import annotations

import faulthandler
import signal
import socket
import struct
from typing import TYPE_CHECKING, Any, BinaryIO

from art_gym._steps import reset_env
from art_gym.rollout._hosts import Make, Slot
from art_gym.rollout._kernel import limit_memory
from art_gym.rollout._packing import pack_outcome, unpack_call

if TYPE_CHECKING:
    from art_gym.rollout.isolation import Processes

HEADER = struct.Struct("<Q")


def framed(content: bytes) -> bytes:
    return HEADER.pack(len(content)) + content


def serve(connection: socket.socket, make: Make, limits: Processes) -> None:
    """Answer until the other side closes the connection or asks for the end.

    Args:
        connection: Where calls come from.
        make: Makes the environment.
        limits: What the environment may take.
    """
    faulthandler.enable()
    if limits.memory is not None:
        limit_memory(limits.memory)
    if limits.cpu_seconds is not None:
        # Tells where the time went, and leaves the rest to the signal, which ends the process.
        faulthandler.register(signal.SIGPROF, chain=True)
    slot = Slot(make)
    stream = connection.makefile("rb")
    while request := _read(stream):
        connection.sendall(framed(_answer(slot, request, limits)))
    slot.close()


def _answer(slot: Slot, request: bytes, limits: Processes) -> bytes:
    def answered() -> Any:
        function, args = unpack_call(request)
        if limits.cpu_seconds is not None and function is reset_env:
            signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
        return slot.call(function, args)

    return pack_outcome(answered, limits.memory)


def _read(stream: BinaryIO) -> bytes:
    """Return the next frame's content; nothing when the other side is gone."""
    header = stream.read(HEADER.size)
    return stream.read(HEADER.unpack(header)[0]) if len(header) == HEADER.size else b""
